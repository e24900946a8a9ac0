// Several runs as columns: how they went, the keys of their configs and the losses that differ.

import { byId, h } from "./dom.js";

function comparison(runs, found) {
  byId("comparison").hidden = false;
  const names = h("tr", {}, h("td"), ...runs.map((run) => h("th", { scope: "col" }, run.name)));
  byId("comparison-table").append(
    h("caption", {}, `${found.verdict[0].toUpperCase()}${found.verdict.slice(1)}.`),
    h("thead", {}, names),
    ...found.tables.map((table) => group(table, runs.length)),
  );
}

function group({ title, rows }, size) {
  const head = h(
    "tr",
    { class: "group" },
    h("th", { scope: "colgroup", colspan: size + 1 }, title),
  );
  const none = h("tr", {}, h("td", { colspan: size + 1, class: "none" }, "None."));
  return h("tbody", {}, head, ...(rows.length ? rows.map(row) : [none]));
}

function row([name, values]) {
  const differs = values.some((value) => value !== values[0]);
  return h(
    "tr",
    { class: differs ? "differs" : "" },
    h("th", { scope: "row" }, name),
    ...values.map((value) => h("td", { class: "numbers" }, value)),
  );
}

export { comparison };
