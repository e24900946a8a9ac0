// Several runs as columns: all figures, and the keys of their configs that differ.

import { byId, h } from "./dom.js";
import { figure, isNumber, whole } from "./format.js";

function comparison(runs, differences) {
  byId("comparison").hidden = false;
  const names = h("tr", {}, h("td"), ...runs.map((run) => h("th", { scope: "col" }, run.name)));
  byId("comparison-table").append(
    h("thead", {}, names),
    ...group("Figures", differences.figures, runs.length),
    ...group("Config, where it differs", differences.config, runs.length),
  );
}

function group(title, rows, size) {
  const head = h("tr", { class: "group" }, h("th", { scope: "colgroup", colspan: size + 1 }, title));
  const none = h("tr", {}, h("td", { colspan: size + 1, class: "none" }, "No differences."));
  return [h("tbody", {}, head, ...(rows.length ? rows.map(row) : [none]))];
}

function row([name, ...values]) {
  const differs = values.some((value) => JSON.stringify(value) !== JSON.stringify(values[0]));
  return h("tr", { class: differs ? "differs" : "" }, h("th", { scope: "row" }, name), ...values.map((value) => h("td", { class: "numbers" }, shown(value))));
}

function shown(value) {
  if (value === null || value === undefined) return "–";
  if (isNumber(value)) return Number.isInteger(value) ? whole(value) : figure(value);
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

export { comparison };
