// Puts the page together: live, or as a report of runs whose data stand in the page itself.

import { comparison } from "./comparison.js";
import { curves } from "./curves.js";
import { byId, h, setAttribute, setText } from "./dom.js";
import { events } from "./events.js";
import { apply, empty, hasEnded } from "./model.js";
import { pipelineDiagram } from "./pipeline_diagram.js";
import { shares } from "./shares.js";
import { stageGraph } from "./stage_graph.js";
import { follow } from "./stream.js";
import { summary } from "./summary.js";
import { theming } from "./theme.js";

const data = byId("data") ? JSON.parse(byId("data").textContent) : null;
const runs = data
  ? data.runs.map((run) => ({ name: run.name, model: apply(empty(), run.state) }))
  : [{ name: "", model: empty() }];
let current = runs[0];

const views = {
  summary: summary(),
  curves: curves(runs),
  graph: stageGraph(),
  timeline: pipelineDiagram(),
  shares: shares(),
  events: events(),
};

function draw() {
  for (const [name, view] of Object.entries(views)) {
    name === "curves" ? view.update() : view.update(current.model, current.name);
  }
}

// Draw once for however many messages come before the browser shows the next picture; none of them
// while nobody looks.
let isDue = false;
function drawSoon() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    draw();
  });
}

function say(text, state) {
  setText(byId("connection"), text);
  setAttribute(byId("connection"), "data-state", state);
}

function live() {
  // The token is a cookie now.
  if (location.search) history.replaceState(null, "", location.pathname);
  follow({
    message: (message) => {
      apply(current.model, message);
      drawSoon();
    },
    connected: (isConnected) => {
      document.body.classList.toggle("stale", !isConnected);
      say(isConnected ? "Live" : "No answer; trying again", isConnected ? "live" : "away");
    },
    ended: () => {
      document.body.classList.remove("stale");
      say("The run has ended", "ended");
    },
  });
}

function report() {
  say(hasEnded(current.model) ? "Report" : "Report of a run that has not ended", "ended");
  byId("hold-label").hidden = true;
  if (runs.length > 1) {
    comparison(runs, data.comparison);
    byId("runs").append(...runs.map((run, index) => h("option", { value: index }, run.name)));
    byId("chooser").hidden = false;
    byId("runs").addEventListener("change", (event) => {
      current = runs[event.target.value];
      draw();
    });
  }
  draw();
}

theming(() => {
  views.curves.restyle();
  views.timeline.restyle();
  drawSoon();
});
data ? report() : live();
