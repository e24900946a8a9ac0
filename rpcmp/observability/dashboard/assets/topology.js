// Which stage reads what, and how fast: nodes and edges of the stage graph.

const DRIVER = "driver";

// Nodes: { name, workers }, the driver first. Edges: { from, to, there, back, rtt }, with bytes a
// second of all pairs of replicas together.
function topology(model) {
  const stages = stagesOf(model);
  const members = new Map(stages.map((stage) => [stage.name, new Set()]));
  for (const worker of model.parts.workers) members.get(worker.stage)?.add(worker.label);
  members.set(DRIVER, new Set([DRIVER]));
  const workersOf = (name) =>
    model.parts.workers.filter((worker) => members.get(name).has(worker.label));
  const nodes = [DRIVER, ...members.keys()].filter(
    (name, index, all) => all.indexOf(name) === index,
  );
  return {
    nodes: nodes.map((name) => ({ name, workers: workersOf(name) })),
    edges: edgesOf(stages).map(([from, to]) => ({
      from,
      to,
      ...rates(model.parts.links, members.get(from), members.get(to)),
    })),
  };
}

// A folder of an older run may not say what its graph was: a chain in the order of its workers.
function stagesOf(model) {
  const known = model.parts.run?.graph?.stages;
  if (known) return known;
  const names = [...new Set(model.parts.workers.map((worker) => worker.stage))].filter(
    (name) => name !== DRIVER,
  );
  return names.map((name, index) => ({ name, inputs: [index ? names[index - 1] : "input"] }));
}

function edgesOf(stages) {
  const found = new Map();
  for (const stage of stages) {
    for (const input of stage.inputs ?? []) {
      const producer = input.split(".")[0];
      const from = producer === "input" || producer === "target" ? DRIVER : producer;
      found.set(`${from} ${stage.name}`, [from, stage.name]);
    }
  }
  return [...found.values()];
}

function rates(links, sources, targets) {
  const between = (from, to) => links.filter((link) => from.has(link.from) && to.has(link.to));
  const [there, back] = [between(sources, targets), between(targets, sources)];
  const sum = (found) => found.reduce((total, link) => total + (link.bytes_per_s ?? 0), 0);
  const times = [...there, ...back]
    .map((link) => link.rtt_s)
    .filter((time) => typeof time === "number");
  return {
    there: there.length ? sum(there) : null,
    back: back.length ? sum(back) : null,
    rtt: times.length ? Math.max(...times) : null,
  };
}

export { DRIVER, topology };
