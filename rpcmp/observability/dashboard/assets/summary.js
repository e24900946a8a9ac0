// The head of the page: which run it is, how far it has come, and its figures.

import { byId, h, keyed, setAttribute, setText } from "./dom.js";
import { about, bytes, duration, figure, isNumber, percent, whole } from "./format.js";

const SENTENCES = {
  failed: "The run has failed",
  interrupted: "The run was interrupted",
  recovering: "Something was lost; the run gets ready to go on",
};

function summary() {
  const figures = byId("figures");
  const update = (model, name) => {
    const { run, progress, workers } = model.parts;
    setText(byId("name"), name || run?.name || "rpcmp");
    setText(byId("status"), progress.status ?? "starting");
    setAttribute(byId("status"), "data-status", progress.status ?? "starting");
    const notice = SENTENCES[progress.status];
    byId("notice").hidden = !notice;
    setAttribute(byId("notice"), "data-status", progress.status ?? "");
    setText(
      byId("notice"),
      notice ? `${notice}${progress.error ? `: ${progress.error}` : "."}` : "",
    );
    showDone(progress);
    const found = figuresOf(progress, workers);
    const cells = keyed(figures, Object.keys(found), (key) =>
      h("div", {}, h("dt", {}, key), h("dd", { class: "numbers" })),
    );
    Object.values(found).forEach((text, index) => setText(cells[index].lastChild, text));
    const share = progress.steps ? `${percent(progress.step / progress.steps)} ` : "";
    document.title = `${share}${run?.name ?? "run"} – rpcmp`;
    const told = run
      ? JSON.stringify({ versions: run.versions, driver: run.driver, config: run.config }, null, 2)
      : "";
    setText(byId("config"), told);
    document.querySelector(".config").hidden = !run;
  };
  return { update };
}

function showDone(progress) {
  const bar = byId("progress");
  const of = progress.steps ? ` of ${whole(progress.steps)}` : "";
  bar.value = progress.steps ? Math.min(1, progress.step / progress.steps) : 0;
  const seconds =
    progress.status === "training" ? (progress.steps - progress.step) * progress.step_s : 0;
  const left = seconds > 0 ? `about ${about(seconds)} left` : "";
  const parts = [
    `Step ${whole(progress.step ?? 0)}${of}`,
    progress.epoch ? `epoch ${progress.epoch}` : "",
    isNumber(progress.seconds) ? about(progress.seconds) : "",
    left,
  ];
  setText(byId("steps"), parts.filter(Boolean).join(" · "));
}

function figuresOf(progress, workers) {
  const busy = workers.map((worker) => worker.busy).filter(isNumber);
  const memory = workers.map((worker) => worker.memory).filter(isNumber);
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  return {
    Loss: figure(progress.loss),
    "Samples/s": whole(progress.rate),
    Step: duration(progress.step_s),
    "Mean busy": percent(busy.length ? sum(busy) / busy.length : null),
    Memory: memory.length ? bytes(sum(memory)) : "–",
    Generation: whole(progress.generation),
    Faults: whole((progress.faults ?? []).length),
    Checkpoint: progress.checkpoint ? `step ${whole(progress.checkpoint.step)}` : "–",
    ...(progress.learning_rates?.length ? { "Learning rate": rates(progress.learning_rates) } : {}),
    ...(isNumber(progress.skipped) ? { Skipped: whole(progress.skipped) } : {}),
  };
}

/** The learning rates of the parameter groups, each once. */
function rates(values) {
  return [...new Set(values.map((value) => String(Number(value.toPrecision(3)))))].join(" · ");
}

export { summary };
