// Zoom of a chart: by dragging (uPlot's own), by keys and by buttons.

const FACTOR = 1.6;
const STEP = 0.25; // of what is seen

// `limits(u)` are the ends of all there is.
function zoom(u, limits, how) {
  const { min, max } = u.scales.x;
  const [first, last] = limits(u);
  const centre =
    u.cursor.left >= 0 && how !== "all"
      ? clamp(u.posToVal(u.cursor.left, "x"), min, max)
      : (min + max) / 2;
  const width = max - min;
  const moved = {
    in: [centre - (centre - min) / FACTOR, centre + (max - centre) / FACTOR],
    out: [centre - (centre - min) * FACTOR, centre + (max - centre) * FACTOR],
    left: [min - width * STEP, max - width * STEP],
    right: [min + width * STEP, max + width * STEP],
    all: [first, last],
  }[how];
  show(u, limits, moved[0], moved[1]);
}

// Show from `begin` to `end`, or as much of that as there is.
function show(u, limits, begin, end) {
  const [first, last] = limits(u);
  const width = Math.min(end - begin, last - first);
  const min = clamp(begin, first, last - width);
  u.setScale("x", { min, max: min + width });
}

function isZoomed(u, limits) {
  if (typeof u.scales.x.min !== "number") return false;
  const [first, last] = limits(u);
  const slack = (last - first) * 1e-6;
  return u.scales.x.min > first + slack || u.scales.x.max < last - slack;
}

const KEYS = { "+": "in", "=": "in", "-": "out", 0: "all", Escape: "all" };

// What a key asks for; undefined: nothing.
function zoomKey(event) {
  return event.ctrlKey || event.metaKey || event.altKey ? undefined : KEYS[event.key];
}

function clamp(value, low, high) {
  return Math.max(low, Math.min(high, value));
}

export { clamp, isZoomed, show, zoom, zoomKey };
