// The stage graph: dagre says what lies where, edges are SVG, nodes are elements that text fits in.

import { byId, h, keyed, setAttribute, setText, svg } from "./dom.js";
import { about, bytes, duration, percent, perSecond } from "./format.js";
import { DRIVER, topology } from "./topology.js";

const NODE = 184; // width in pixels
const LABEL = { width: 92, height: 34 };
const NARROW = 720; // below it the graph runs down, not to the right
const LONG = 5; // seconds in one action that are worth a word
const LEAST = 0.7; // no smaller than that: what does not fit then is scrolled

function stageGraph() {
  const root = byId("graph");
  const edges = svg("svg", { "aria-hidden": "true" });
  const labels = h("div", { class: "labels" });
  const nodes = h("div", { class: "nodes" });
  const canvas = h("div", { class: "canvas" }, edges, labels, nodes);
  root.append(canvas);
  let shape = "";
  let last = null;

  const update = (model) => {
    last = model;
    const found = topology(model);
    draw(found);
    table(found);
  };
  const draw = (found) => {
    if (!root.clientWidth) return; // shown as a table
    const isNarrow = root.clientWidth < NARROW;
    const names = found.nodes.map((node) => node.name);
    const elements = keyed(nodes, names, () => h("article", { class: "node", tabindex: "0" }));
    found.nodes.forEach((node, index) => showNode(elements[index], node));
    const texts = keyed(
      labels,
      found.edges.map((edge) => `${edge.from} ${edge.to}`),
      () => h("div", { class: "rate" }),
    );
    found.edges.forEach((edge, index) => showRate(texts[index], edge, isNarrow));
    const wanted = JSON.stringify([
      isNarrow,
      root.clientWidth,
      names,
      elements.map((element) => element.offsetHeight),
      found.edges.map((edge) => [edge.from, edge.to]),
    ]);
    if (wanted === shape) return;
    shape = wanted;
    place(layout(found, isNarrow, elements), { root, canvas, edges, elements, texts });
  };
  new ResizeObserver(() => last && draw(topology(last))).observe(root);
  for (const choice of document.querySelectorAll("[name=stages-as]")) {
    choice.addEventListener("change", () => {
      root.hidden = choice.value !== "graph";
      byId("stage-table").hidden = choice.value !== "table";
      if (last) update(last);
    });
  }
  return { update };
}

// dagre's answer: { width, height, nodes: [{ x, y, height }], edges: [{ points, x, y }] }.
function layout(found, isNarrow, elements) {
  const g = new dagre.graphlib.Graph();
  g.setGraph({
    rankdir: isNarrow ? "TB" : "LR",
    nodesep: 28,
    ranksep: isNarrow ? 12 : 8,
    edgesep: 12,
    marginx: isNarrow ? 14 : 2,
    marginy: 2,
  });
  g.setDefaultEdgeLabel(() => ({}));
  found.nodes.forEach((node, index) =>
    g.setNode(node.name, { width: NODE, height: elements[index].offsetHeight }),
  );
  found.edges.forEach((edge) =>
    g.setEdge(edge.from, edge.to, { ...LABEL, labelpos: isNarrow ? "r" : "c", labeloffset: 4 }),
  );
  dagre.layout(g);
  return {
    width: g.graph().width,
    height: g.graph().height,
    nodes: found.nodes.map((node) => g.node(node.name)),
    edges: found.edges.map((edge) => g.edge(edge.from, edge.to)),
  };
}

function place(found, { root, canvas, edges, elements, texts }) {
  const scale = Math.max(LEAST, Math.min(1, root.clientWidth / found.width));
  const left = Math.max(0, (root.clientWidth - found.width * scale) / 2);
  canvas.style.width = `${found.width}px`;
  canvas.style.height = `${found.height}px`;
  canvas.style.transform = `translateX(${left}px) scale(${scale})`;
  root.style.height = `${Math.ceil(found.height * scale) + 4}px`;
  setAttribute(edges, "viewBox", `0 0 ${found.width} ${found.height}`);
  elements.forEach((element, index) => {
    const { x, y, height } = found.nodes[index];
    element.style.transform = `translate(${x - NODE / 2}px, ${y - height / 2}px)`;
  });
  texts.forEach((element, index) => {
    const { x, y } = found.edges[index];
    element.style.transform = `translate(${x - LABEL.width / 2}px, ${y - LABEL.height / 2}px)`;
  });
  edges.replaceChildren(
    svg(
      "defs",
      {},
      svg(
        "marker",
        {
          id: "arrow",
          viewBox: "0 0 8 8",
          refX: 7,
          refY: 4,
          markerWidth: 7,
          markerHeight: 7,
          orient: "auto",
        },
        svg("path", { d: "M0 0.5 L8 4 L0 7.5 z" }),
      ),
    ),
    ...found.edges.map((edge) =>
      svg("path", { d: curve(edge.points), "marker-end": "url(#arrow)" }),
    ),
  );
}

// A path that is drawn to the middle of each leg and bends at the points between.
function curve(points) {
  const at = ({ x, y }) => `${x.toFixed(1)} ${y.toFixed(1)}`;
  const parts = [`M${at(points[0])}`];
  for (let index = 1; index < points.length - 1; index++) {
    const [here, next] = [points[index], points[index + 1]];
    const isLast = index === points.length - 2;
    parts.push(
      `Q${at(here)} ${at(isLast ? next : { x: (here.x + next.x) / 2, y: (here.y + next.y) / 2 })}`,
    );
  }
  if (points.length === 2) parts.push(`L${at(points[1])}`);
  return parts.join(" ");
}

// The state that a node shows: of its workers' the one that matters most.
const ORDER = ["lost", "starting", "building", "running", "ended"];
const SIGNS = { lost: "✕", starting: "○", building: "◔", running: "●", ended: "■" };

function stateOf(workers) {
  return (
    ORDER.find((state) => workers.some((worker) => worker.state === state)) ??
    workers[0]?.state ??
    ""
  );
}

function showNode(element, node) {
  const isDriver = node.name === DRIVER && !node.workers.length;
  const state = stateOf(node.workers);
  setAttribute(element, "data-state", isDriver ? "driver" : state);
  setAttribute(element, "aria-label", [node.name, ...node.workers.map(describe)].join(", "));
  if (!element.firstChild) {
    element.append(
      h("header", {}, h("strong", { title: node.name }, node.name), h("span", { class: "state" })),
      h("div", { class: "workers" }),
    );
  }
  setText(element.querySelector(".state"), state ? `${SIGNS[state] ?? "○"} ${state}` : "");
  const rows = keyed(
    element.querySelector(".workers"),
    node.workers.map((worker) => worker.label),
    makeWorker,
  );
  node.workers.forEach((worker, index) => showWorker(rows[index], worker, node.workers.length > 1));
}

function makeWorker() {
  return h(
    "div",
    { class: "worker" },
    h("p", { class: "where" }),
    h(
      "div",
      { class: "load" },
      h("span", { class: "meter" }, h("span")),
      h("span", { class: "share numbers" }),
    ),
    h("p", { class: "facts numbers" }),
  );
}

function showWorker(element, worker, isReplica) {
  const [where, load, facts] = element.children;
  const name = isReplica ? `${worker.replica} ${SIGNS[worker.state] ?? "○"}` : "";
  setAttribute(element, "data-state", worker.state);
  setText(where, [name, placeOf(worker)].filter(Boolean).join(" "));
  setAttribute(where, "title", worker.address ?? "");
  load.hidden = worker.label === DRIVER;
  load.firstChild.firstChild.style.width = `${Math.min(1, worker.busy ?? 0) * 100}%`;
  setText(load.lastChild, percent(worker.busy));
  setText(facts, factsOf(worker).join(" · "));
}

function placeOf(worker) {
  return [worker.host, worker.device].filter(Boolean).join(" · ") || worker.address || "";
}

function factsOf(worker) {
  const facts = [];
  if (worker.memory) facts.push(bytes(worker.memory));
  if (worker.device_memory) facts.push(`${bytes(worker.device_memory)} on ${worker.device}`);
  if (worker.in_flight) facts.push(`${worker.in_flight} in flight`);
  if (worker.state === "running" && worker.seconds > LONG)
    facts.push(`${worker.phase} for ${about(worker.seconds)}`);
  return facts.length ? facts : [" "];
}

function describe(worker) {
  return [
    worker.label,
    worker.state,
    placeOf(worker),
    `${percent(worker.busy)} busy`,
    ...factsOf(worker),
  ].join(", ");
}

function showRate(element, edge, isNarrow) {
  element.classList.toggle("beside", isNarrow);
  const [there, back] = isNarrow ? ["↓", "↑"] : ["→", "←"];
  const lines = [
    edge.there && `${there} ${perSecond(edge.there)}`,
    edge.back && `${back} ${perSecond(edge.back)}`,
  ].filter(Boolean);
  keyed(
    element,
    lines.map((line, index) => index),
    () => h("span"),
  ).forEach((span, index) => setText(span, lines[index]));
  setAttribute(
    element,
    "title",
    `${edge.from} to ${edge.to}${edge.rtt ? `, there and back in ${duration(edge.rtt)}` : ""}`,
  );
}

// The same for those who would rather read.
function table(found) {
  const root = byId("stage-table");
  if (root.hidden) return;
  const heads = [
    "Worker",
    "State",
    "Where",
    "Device",
    "Busy",
    "Memory",
    "In flight",
    "Restarts",
    "Reads",
    "Receives",
  ];
  if (!root.firstChild) {
    root.append(
      h(
        "table",
        { class: "table" },
        h("thead", {}, h("tr", {}, ...heads.map((head) => h("th", { scope: "col" }, head)))),
        h("tbody"),
      ),
    );
  }
  const rows = found.nodes.flatMap((node) => node.workers.map((worker) => [node, worker]));
  const elements = keyed(
    root.querySelector("tbody"),
    rows.map(([, worker]) => worker.label),
    () => h("tr", {}, h("th", { scope: "row" }), ...heads.slice(1).map(() => h("td"))),
  );
  rows.forEach(([node, worker], index) => {
    const reads = found.edges.filter((edge) => edge.to === node.name);
    const cells = [
      worker.label,
      `${SIGNS[worker.state] ?? ""} ${worker.state}`,
      worker.host || worker.address || "",
      [worker.device, worker.device_memory ? bytes(worker.device_memory) : ""]
        .filter(Boolean)
        .join(" · "),
      percent(worker.busy),
      bytes(worker.memory),
      String(worker.in_flight ?? "–"),
      String(worker.restarts ?? "–"),
      reads.map((edge) => edge.from).join(", "),
      reads.map((edge) => perSecond(edge.there)).join(", "),
    ];
    setAttribute(elements[index], "data-state", worker.state);
    cells.forEach((text, column) => setText(elements[index].children[column], text));
  });
}

export { stageGraph };
