// The pipeline diagram of a step: a row a stage, time to the right. uPlot has the axes, the scales
// and the zoom; the boxes are drawn on its canvas.

import { byId, h, setText } from "./dom.js";
import { milliseconds } from "./format.js";
import { colour } from "./theme.js";
import { clamp, isZoomed, show, zoom, zoomKey } from "./zoom.js";

const KINDS = { F: "forward", B: "input gradient", W: "weight gradient", O: "optimizer" };
const LOSSES = { bubble: "bubble", network: "network", overhead: "overhead" };
const ROW = 44;
const BOX = 0.74; // of a row
const HINT = "Point at an action, or go from one to the next by the arrow keys; drag to zoom.";
const FONT = "12px system-ui, sans-serif";

function pipelineDiagram() {
  const root = byId("timeline");
  const hold = byId("hold");
  const reading = byId("span");
  let u = null;
  let shape = "";
  let shown = null; // the diagram
  let last = null; // the model
  let chosen = null; // { row, index } of the action that the keyboard is at

  const limits = () => [0, u.data[0][1]];
  const tell = () => {
    const found = chosen ? shown.stages[chosen.row].spans[chosen.index] : under(u, shown);
    const row = chosen ? chosen.row : found?.row;
    setText(reading, found ? text(shown.stages[row], chosen ? found : found.span) : HINT);
  };
  const update = (model) => {
    last = model;
    const next = model.parts.timeline;
    byId("timeline-none").hidden = Boolean(next);
    if (!next && shown) forget(); // another run is looked at
    if (!next || next === shown || (hold.checked && shown)) return;
    shown = next;
    draw();
  };
  const forget = () => {
    u?.destroy();
    u = shown = chosen = null;
    setText(byId("timeline-title"), "Last step");
    setText(reading, "");
  };
  const draw = () => {
    if (!shown || !root.clientWidth) return;
    setText(byId("timeline-title"), `Step ${shown.step.toLocaleString("en-US")}`);
    const end = length(shown);
    const wanted = JSON.stringify([shown.stages.map((stage) => stage.label), root.clientWidth]);
    if (chosen && !shown.stages[chosen.row]?.spans[chosen.index]) chosen = null;
    if (u && wanted === shape) {
      const kept = isZoomed(u, limits) ? { ...u.scales.x } : null;
      u.batch(() => {
        u.setData(
          [
            [0, end],
            [0, 0],
          ],
          kept === null,
        );
        if (kept) show(u, limits, kept.min, kept.max);
      });
      u.redraw(false);
    } else {
      u?.destroy();
      shape = wanted;
      const hooks = {
        draw: [(self) => paint(self, shown, chosen)],
        setCursor: [() => u && !chosen && tell()],
      };
      u = new uPlot(
        settings(root, shown, hooks),
        [
          [0, end],
          [0, 0],
        ],
        root,
      );
    }
    tell();
  };

  const choose = (row, index) => {
    const spans = shown.stages[row].spans;
    if (!spans.length) return;
    chosen = { row, index: clamp(index, 0, spans.length - 1) };
    const [, , start, end] = spans[chosen.index];
    const { min, max } = u.scales.x;
    if (start < min || end > max)
      show(u, limits, (start + end - max + min) / 2, (start + end + max - min) / 2);
    u.redraw(false);
    tell();
  };
  const press = (event) => {
    const how = zoomKey(event);
    if (!u || (how === undefined && !event.key.startsWith("Arrow"))) return;
    event.preventDefault();
    if (how !== undefined) return zoom(u, limits, how);
    const { row, index } = chosen ?? { row: 0, index: -1 };
    if (event.key === "ArrowRight") choose(row, index + 1);
    if (event.key === "ArrowLeft") choose(row, index - 1);
    if (event.key === "ArrowUp") choose(...beside(shown, chosen, -1));
    if (event.key === "ArrowDown") choose(...beside(shown, chosen, 1));
  };
  const forgetChoice = () => {
    chosen = null;
    u?.redraw(false);
  };
  root.addEventListener("keydown", press);
  root.addEventListener("blur", forgetChoice);
  root.addEventListener("pointermove", () => chosen && forgetChoice());
  for (const button of document.querySelectorAll("[data-zoom]")) {
    button.addEventListener("click", () => u && zoom(u, limits, button.dataset.zoom));
  }
  hold.addEventListener("change", () => last && update(last));
  new ResizeObserver(draw).observe(root);
  legend();
  const restyle = () => {
    u?.destroy();
    u = null;
    draw();
  };
  return { update, restyle };
}

// The action of the row above or below that goes on at the same time, or the last before.
function beside(shown, chosen, by) {
  if (!chosen) return [0, 0];
  const row = clamp(chosen.row + by, 0, shown.stages.length - 1);
  const at = shown.stages[chosen.row].spans[chosen.index][2];
  return [
    row,
    Math.max(
      0,
      shown.stages[row].spans.findLastIndex((span) => span[2] <= at),
    ),
  ];
}

function length(shown) {
  const ends = shown.stages.flatMap((stage) =>
    [...stage.spans, ...stage.idle].map((span) => span.at(-1)),
  );
  return Math.max(1, ...ends);
}

function settings(root, shown, hooks) {
  const names = shown.stages.map((stage) => stage.label);
  const longest = Math.max(...names.map((name) => name.length));
  const axis = { stroke: colour("muted"), font: FONT, ticks: { show: false } };
  return {
    width: root.clientWidth,
    height: ROW * names.length + 44,
    padding: [4, 24, 0, 0],
    legend: { show: false },
    cursor: { y: false, points: { show: false }, drag: { x: true, y: false, dist: 4 } },
    scales: {
      x: { time: false, range: (u, min, max) => [min, max > min ? max : min + 1] },
      y: { range: () => [-0.5, names.length - 0.5], dir: -1 },
    },
    axes: [
      {
        ...axis,
        size: 32,
        gap: 8,
        space: 70,
        grid: { stroke: colour("grid"), width: 1 },
        values: (u, ticks) => ticks.map((tick) => `${Number((tick / 1000).toPrecision(6))} ms`),
      },
      {
        ...axis,
        stroke: colour("text"),
        size: Math.min(root.clientWidth / 4, 24 + longest * 7),
        gap: 10,
        grid: { show: false },
        splits: () => names.map((name, index) => index),
        values: () =>
          names.map((name) =>
            name.length * 7 > root.clientWidth / 4 - 20 ? `${name.slice(0, 8)}…` : name,
          ),
      },
    ],
    series: [{}, { paths: () => null, points: { show: false } }],
    hooks,
  };
}

function paint(u, shown, chosen) {
  const { ctx, bbox } = u;
  const scale = devicePixelRatio;
  const height = (bbox.height / shown.stages.length) * BOX;
  const pattern = hatched(ctx, scale);
  const fills = Object.fromEntries(
    Object.keys({ ...KINDS, ...LOSSES }).map((name) => [
      name,
      colour(`kind-${name.toLowerCase()}`),
    ]),
  );
  const box = (row, start, end) => {
    const left = Math.max(bbox.left, u.valToPos(start, "x", true));
    const right = Math.min(bbox.left + bbox.width, u.valToPos(end, "x", true));
    return right < left
      ? null
      : [left, u.valToPos(row, "y", true) - height / 2, Math.max(scale / 2, right - left), height];
  };
  ctx.save();
  ctx.font = `${11 * scale}px system-ui, sans-serif`;
  ctx.textAlign = "center";
  ctx.textBaseline = "middle";
  shown.stages.forEach((stage, row) => {
    for (const [loss, start, end] of stage.idle) {
      const place = box(row, start, end);
      if (!place) continue;
      ctx.fillStyle = fills[loss] ?? fills.bubble;
      ctx.fillRect(...place);
      if (loss === "network") {
        ctx.fillStyle = pattern;
        ctx.fillRect(...place);
      }
    }
    stage.spans.forEach(([kind, microbatch, start, end], index) => {
      const place = box(row, start, end);
      if (!place) return;
      const [left, top, width] = place;
      ctx.fillStyle = fills[kind];
      ctx.fillRect(left, top, width > 3 * scale ? width - scale : width, height);
      const label = kind === "O" ? "" : String(microbatch);
      if (label && width > (label.length * 7 + 4) * scale) {
        ctx.fillStyle = "#10202c";
        ctx.fillText(label, left + width / 2, top + height / 2);
      }
      if (chosen?.row === row && chosen.index === index) {
        ctx.strokeStyle = colour("text");
        ctx.lineWidth = 3 * scale;
        ctx.strokeRect(left, top, width, height);
      }
    });
  });
  ctx.restore();
}

// Stripes: waiting for the network is told from a bubble without colours, too.
function hatched(ctx, scale) {
  const size = 6 * scale;
  const tile = document.createElement("canvas");
  tile.width = tile.height = size;
  const pen = tile.getContext("2d");
  pen.strokeStyle = colour("hatch");
  pen.lineWidth = scale;
  pen.beginPath();
  pen.moveTo(0, size);
  pen.lineTo(size, 0);
  pen.stroke();
  return ctx.createPattern(tile, "repeat");
}

// What the pointer is over: { row, span } or null.
function under(u, shown) {
  const { left, top } = u?.cursor ?? {};
  if (left === undefined || left < 0) return null;
  const at = u.posToVal(left, "x");
  const row = Math.round(u.posToVal(top, "y"));
  const stage = shown.stages[row];
  const span =
    stage?.spans.find(([, , start, end]) => start <= at && at <= end) ??
    stage?.idle.find(([, start, end]) => start <= at && at <= end);
  return span ? { row, span } : null;
}

function text(stage, span) {
  const [start, end] = span.slice(-2).map((microseconds) => microseconds / 1000);
  const [begun, ended] = [start, end].map(milliseconds);
  const times = `${milliseconds(end - start)}, from ${begun} to ${ended}`;
  const [what, microbatch] = span;
  if (span.length === 3) return `${stage.label}: idle, ${LOSSES[what] ?? what}, ${times}`;
  const of = what === "O" ? "" : ` of micro-batch ${microbatch}`;
  return `${stage.label}: ${KINDS[what] ?? what}${of}, ${times}`;
}

function legend() {
  const names = {
    ...KINDS,
    ...Object.fromEntries(Object.keys(LOSSES).map((loss) => [loss, `idle: ${loss}`])),
  };
  byId("timeline-legend").append(
    ...Object.entries(names).map(([kind, name]) =>
      h("li", {}, h("span", { class: `swatch box kind-${kind.toLowerCase()}` }), name),
    ),
  );
}

export { KINDS, LOSSES, pipelineDiagram };
