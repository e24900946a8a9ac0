// Where each stage's time went in the last step, and what limits them all.

import { byId, h, keyed, setAttribute, setText } from "./dom.js";
import { percent } from "./format.js";
import { KINDS, LOSSES } from "./pipeline_diagram.js";

const PARTS = [...Object.keys(KINDS), ...Object.keys(LOSSES)];

function shares() {
  const root = byId("shares");
  const heads = ["Stage", "Shares of the step", "Bubble", "Network", "Overhead", "Computes"];
  const body = h("tbody");
  root.append(
    h("thead", {}, h("tr", {}, ...heads.map((head) => h("th", { scope: "col" }, head)))),
    body,
  );

  const update = (model) => {
    const shown = model.parts.timeline;
    byId("shares-card").hidden = !shown;
    byId("bottleneck").hidden = !shown?.bottleneck;
    if (!shown) return;
    setText(byId("bottleneck"), capital(shown.bottleneck));
    const rows = keyed(
      body,
      shown.stages.map((stage) => stage.label),
      make,
    );
    shown.stages.forEach((stage, index) => fill(rows[index], stage));
  };
  return { update };
}

function make() {
  const bar = h(
    "div",
    { class: "bar", "aria-hidden": "true" },
    ...PARTS.map((part) => h("span", { class: `kind-${part.toLowerCase()}` })),
  );
  return h(
    "tr",
    {},
    h("th", { scope: "row" }),
    h("td", {}, bar),
    ...[0, 1, 2, 3].map(() => h("td", { class: "numbers" })),
  );
}

function fill(row, stage) {
  const values = { ...stage.busy, ...stage.lost };
  const computes = Object.values(stage.busy).reduce((sum, share) => sum + share, 0);
  const [name, bar, ...cells] = row.children;
  setText(name, stage.label);
  [...bar.firstChild.children].forEach((part, index) => {
    const share = values[PARTS[index]] ?? 0;
    part.style.width = `${share * 100}%`;
    setAttribute(
      part,
      "title",
      `${KINDS[PARTS[index]] ?? `idle: ${PARTS[index]}`} ${percent(share)}`,
    );
  });
  const shown = [...Object.keys(LOSSES).map((loss) => stage.lost[loss]), computes];
  shown.forEach((share, index) => setText(cells[index], percent(share)));
}

// "Bottleneck: stage1 computes ..."
function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

export { shares };
