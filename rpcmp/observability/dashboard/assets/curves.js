// Loss and throughput by step or by time, of one run or of several over each other.

import { byId, h, keyed, setText } from "./dom.js";
import { duration, figure, whole } from "./format.js";
import { columns } from "./model.js";
import { colour } from "./theme.js";
import { clamp, isZoomed, zoom, zoomKey } from "./zoom.js";

const HEIGHT = 260;
const FONT = "12px system-ui, sans-serif";
const RUNS = ["run-1", "run-2", "run-3", "run-4", "run-5", "run-6"];

// `runs` is a list of { name, model }.
function curves(runs) {
  const options = { log: byId("log"), time: byId("by-time"), smoothing: byId("smoothing") };
  const loss = chart(byId("loss"), byId("loss-reading"), { floor: false, read: figure });
  const rate = chart(byId("rate"), byId("rate-reading"), {
    floor: true,
    read: whole,
  });

  const update = () => {
    const byTime = options.time.checked;
    const found = runs.map((run, index) =>
      tables(run, Number(options.smoothing.value), byTime, index, runs.length > 1),
    );
    const faults = runs.length === 1 ? marks(runs[0].model, byTime) : [];
    const isLog = options.log.checked;
    loss.show(
      found.flatMap((run) => run.loss),
      { byTime, isLog, faults },
    );
    rate.show(
      found.flatMap((run) => run.rate),
      { byTime, isLog: false, faults },
    );
    legend(runs);
  };
  for (const input of Object.values(options)) input.addEventListener("input", update);
  return { update, restyle: () => [loss, rate].forEach((one) => one.forget()) };
}

// The lines of one run. A line: { name, x, y, style, low?, high? }.
function tables({ model, name }, weight, byTime, index, isOneOfSeveral) {
  const found = columns(model);
  const x = byTime ? found.seconds : found.step;
  const prefix = RUNS[index % RUNS.length];
  const evaluated = model.parts.evaluations.filter(
    ([, , values]) => typeof values.loss === "number",
  );
  return {
    loss: [
      {
        name: "loss",
        x,
        y: found.loss,
        low: found.low,
        high: found.high,
        style: "raw",
        colour: prefix,
      },
      {
        name: "smoothed",
        x,
        y: smooth(found.loss, weight),
        style: "line",
        colour: prefix,
        run: name,
      },
      {
        name: "evaluation",
        x: evaluated.map((row) => (byTime ? row[1] : row[0])),
        y: evaluated.map((row) => row[2].loss),
        style: "points",
        colour: isOneOfSeveral ? prefix : "evaluation",
      },
    ],
    rate: [
      { name: "rate", x, y: found.rate, style: "raw", colour: prefix },
      {
        name: "smoothed",
        x,
        y: smooth(found.rate, weight),
        style: "line",
        colour: prefix,
        run: name,
      },
    ],
  };
}

// An exponential mean without the bias of its begin; what is no number is left out.
function smooth(values, weight) {
  let sum = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = sum * weight + value * (1 - weight);
    total = total * weight + (1 - weight);
    return sum / total;
  });
}

// Where the run was interrupted by a fault.
function marks(model, byTime) {
  const steps = model.parts.progress.faults ?? [];
  if (!byTime) return steps;
  return steps.map((step) => (model.rows.find((row) => row[0] >= step) ?? [0, 0])[1]);
}

function legend(runs) {
  const named = runs.length > 1;
  const names = named
    ? runs.map((run, index) => [run.name, RUNS[index % RUNS.length], "line"])
    : [
        ["smoothed", "run-1", "line"],
        ["each step", "run-1", "raw"],
        ["evaluation", "evaluation", "points"],
        ["fault", "lost", "mark"],
      ];
  const shown = names.filter(([name]) => named || needed(name, runs[0].model));
  keyed(
    byId("curves-legend"),
    shown.map(([name], index) => `${index} ${name}`),
    (key) => {
      const [name, hue, style] = shown[Number(key.split(" ")[0])];
      return h("li", {}, h("span", { class: `swatch ${style} ${hue}` }), name);
    },
  );
}

function needed(name, model) {
  if (name === "evaluation") return model.parts.evaluations.length > 0;
  return name !== "fault" || (model.parts.progress.faults ?? []).length > 0;
}

// A chart in `root`, which tells in `reading` what is under the cursor.
function chart(root, reading, { floor, read }) {
  let u = null;
  let shape = "";
  let drawn = { lines: [], faults: [], byTime: false };

  const limits = () => {
    const x = u.data[0];
    const [first, last] = x.length ? [x[0], x[x.length - 1]] : [0, 1];
    return last > first ? [first, last] : [first - 1, last + 1];
  };
  const tell = () => {
    const index = u?.cursor.idx ?? (u ? u.data[0].length - 1 : -1);
    setText(reading, index < 0 ? "" : told(index));
  };
  const told = (index) => {
    const x = u.data[0][index];
    const at = drawn.byTime ? duration(x) : `step ${whole(x)}`;
    const values = (style) =>
      drawn.lines
        .filter((line) => line.style === style)
        .map((line) => [line.run, read(before(u.data[1 + line.at], index))]);
    const [raw, smoothed] = [values("raw"), values("line")];
    if (raw.length === 1) return `${at}: ${raw[0][1]} (smoothed ${smoothed[0][1]})`;
    return `${at}: ${smoothed.map(([run, value]) => `${run} ${value}`).join(", ")}`;
  };

  root.addEventListener("keydown", (event) => {
    const how = zoomKey(event);
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (!u || (how === undefined && step === undefined) || event.altKey) return;
    event.preventDefault();
    if (how !== undefined) return zoom(u, limits, how);
    reading.setAttribute("aria-live", "polite"); // it is asked for
    const size = u.data[0].length;
    const index = clamp((u.cursor.idx ?? size - 1) + step * (event.shiftKey ? 10 : 1), 0, size - 1);
    u.setCursor({ left: u.valToPos(u.data[0][index], "x"), top: u.over.clientHeight / 2 });
  });
  root.addEventListener("blur", () => reading.setAttribute("aria-live", "off"));
  new ResizeObserver(() => u?.setSize({ width: root.clientWidth, height: HEIGHT })).observe(root);

  return {
    forget: () => {
      u?.destroy();
      u = null;
    },
    show: (lines, { byTime, isLog, faults }) => {
      const joined = join(lines, isLog);
      drawn = { lines: joined.lines, faults, byTime };
      const wanted = JSON.stringify([
        isLog,
        byTime,
        lines.map((line) => [line.style, line.colour]),
      ]);
      if (u && wanted === shape) {
        const kept = isZoomed(u, limits) ? { ...u.scales.x } : null;
        u.batch(() => {
          u.setData(joined.data, kept === null);
          if (kept) u.setScale("x", { min: kept.min, max: kept.max });
        });
      } else {
        u?.destroy();
        shape = wanted;
        const hooks = { setCursor: [tell], draw: [(self) => drawMarks(self, drawn.faults)] };
        u = new uPlot(settings(root, joined, { byTime, isLog, floor, hooks }), joined.data, root);
      }
      tell();
    },
  };
}

function before(values, index) {
  while (index > 0 && !Number.isFinite(values[index])) index--;
  return values[index];
}

// All lines over one x axis, as uPlot has it, and where each went.
function join(lines, isLog) {
  const usable = (values) => (isLog ? values.map((value) => (value > 0 ? value : null)) : values);
  let at = 0;
  const placed = [];
  const parts = lines.map((line) => {
    const ys = [line.y, ...(line.low ? [line.low, line.high] : [])];
    placed.push({ ...line, at });
    at += ys.length;
    return [line.x, ...ys.map(usable)];
  });
  return { data: uPlot.join(parts), lines: placed };
}

function settings(root, joined, { byTime, isLog, floor, hooks }) {
  const series = [{}];
  const bands = [];
  for (const line of joined.lines) {
    series.push(style(line));
    if (!line.low) continue;
    series.push(
      { stroke: "transparent", points: { show: false } },
      { stroke: "transparent", points: { show: false } },
    );
    bands.push({ series: [line.at + 3, line.at + 2], fill: faded(colour(line.colour), 0.16) });
  }
  const axis = {
    stroke: colour("muted"),
    font: FONT,
    grid: { stroke: colour("grid"), width: 1 },
    ticks: { show: false },
  };
  return {
    width: root.clientWidth,
    height: HEIGHT,
    padding: [8, 18, 0, 0],
    legend: { show: false },
    cursor: { y: false, points: { size: 7 }, drag: { x: true, y: false } },
    scales: {
      x: { time: false, range: (u, min, max) => (max > min ? [min, max] : [min - 1, max + 1]) },
      y: isLog
        ? { distr: 3 }
        : { range: (u, min, max) => padded(floor ? Math.min(0, min) : min, max) },
    },
    axes: [
      {
        ...axis,
        values: (u, ticks) =>
          ticks.map((tick) =>
            byTime ? duration(tick) : Number.isInteger(tick) ? whole(tick) : "",
          ),
        space: byTime ? 80 : 60,
        size: 32,
        gap: 8,
      },
      {
        ...axis,
        size: 58,
        gap: 8,
        values: (u, ticks) => ticks.map((tick) => (tick === null ? "" : shorter(tick))),
      },
    ],
    series,
    bands,
    hooks,
  };
}

function style(line) {
  const stroke = colour(line.colour);
  if (line.style === "points")
    return {
      stroke,
      width: 0,
      paths: () => null,
      points: { show: true, size: 8, fill: colour("surface"), width: 2 },
    };
  if (line.style === "raw")
    return { stroke: faded(stroke, 0.4), width: 1, points: { show: false } };
  return { stroke, width: 2, points: { show: false } };
}

function padded(min, max) {
  if (min === null || max === null) return [0, 1];
  const room = (max - min || Math.abs(max) || 1) * 0.06;
  return [min === 0 ? 0 : min - room, max + room];
}

function shorter(value) {
  if (value === 0 || (Math.abs(value) >= 0.001 && Math.abs(value) < 10000))
    return String(Number(value.toPrecision(4)));
  return Math.abs(value) < 1
    ? value.toExponential(0)
    : new Intl.NumberFormat("en-US", { notation: "compact" }).format(value);
}

// `rgb(...)`, as computed colours are, with an opacity.
function faded(rgb, opacity) {
  return rgb.replace("rgb(", "rgba(").replace(")", `, ${opacity})`);
}

function drawMarks(u, steps) {
  if (!steps.length) return;
  const { ctx, bbox } = u;
  ctx.save();
  ctx.strokeStyle = colour("lost");
  ctx.lineWidth = devicePixelRatio * 1.5;
  ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
  for (const step of steps) {
    const x = u.valToPos(step, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}

export { curves };
