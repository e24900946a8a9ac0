// What is known of a run: the server's state, put together from its messages.

const EVENTS = 200; // of each kind, as many as the server keeps

function empty() {
  return {
    version: 0,
    parts: { progress: {}, workers: [], links: [], evaluations: [], counts: {} },
    rows: [],
    entries: [],
  };
}

// Take a message of rpcmp/observability/dashboard/state.py.
function apply(model, message) {
  if (message.is_all) Object.assign(model, empty());
  model.version = message.version;
  Object.assign(model.parts, message.parts);
  if (message.curve) {
    model.rows.length = message.curve.from;
    model.rows.push(...message.curve.rows);
  }
  if (message.entries.length) model.entries = newest([...model.entries, ...message.entries]);
  return model;
}

// The last entries of each kind: a flood of one hides nothing of another.
function newest(entries) {
  const counts = {};
  const isKept = ({ kind }) => (counts[kind] = (counts[kind] ?? 0) + 1) <= EVENTS;
  return entries.reverse().filter(isKept).reverse();
}

// The rows by column, for charts.
function columns(model) {
  const names = ["step", "seconds", "loss", "low", "high", "rate"];
  const found = Object.fromEntries(names.map((name) => [name, new Array(model.rows.length)]));
  model.rows.forEach((row, index) =>
    names.forEach((name, column) => (found[name][index] = row[column])),
  );
  return found;
}

const ENDED = ["done", "failed", "interrupted"];

function hasEnded(model) {
  return ENDED.includes(model.parts.progress.status);
}

export { apply, columns, empty, hasEnded };
