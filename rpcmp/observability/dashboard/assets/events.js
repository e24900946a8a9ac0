// What happened, newest first; a bounded number of lines whatever a run says.

import { byId, h, keyed, setText } from "./dom.js";
import { clock, whole } from "./format.js";

const LINES = 200;
const KINDS = {
  fault: "Faults",
  generation: "Generations",
  checkpoint: "Checkpoints",
  evaluation: "Evaluations",
  message: "Messages",
  run: "Run",
};

function events() {
  const root = byId("events");
  const hidden = new Set();
  let last = null;
  const boxes = Object.entries(KINDS).map(([kind, name]) => {
    const box = h("input", { type: "checkbox", checked: true });
    box.addEventListener("change", () => {
      box.checked ? hidden.delete(kind) : hidden.add(kind);
      if (last) update(last);
    });
    const count = h("span", { class: "count numbers" });
    byId("filters").append(
      h("label", { class: `chip ${kind}` }, box, h("span", {}, name, " ", count)),
    );
    return [kind, count];
  });

  const update = (model) => {
    last = model;
    for (const [kind, count] of boxes) setText(count, whole(model.parts.counts[kind] ?? 0));
    const shown = model.entries
      .filter((entry) => !hidden.has(entry.kind))
      .slice(-LINES)
      .reverse();
    // Another run counts its lines from the same begin.
    const byKey = new Map(
      shown.map((entry) => [`${entry.n} ${entry.time} ${entry.text}`, entry]),
    );
    keyed(root, [...byKey.keys()], (key) => line(byKey.get(key)));
    root.hidden = !shown.length;
    byId("events-none").hidden = shown.length > 0;
  };
  return { update };
}

function line(entry) {
  return h(
    "li",
    { class: `event ${entry.kind} ${entry.level}` },
    h("time", { class: "numbers" }, clock(entry.time)),
    h("span", { class: "kind" }, entry.kind),
    h(
      "span",
      { class: "at numbers" },
      [entry.step === null ? "" : `step ${whole(entry.step)}`, entry.stage]
        .filter(Boolean)
        .join(" · "),
    ),
    h("span", { class: "text" }, entry.text),
  );
}

export { events };
