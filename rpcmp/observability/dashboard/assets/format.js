// Values as people read them. An en dash stands for what is not known.

const NONE = "–";
const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

function whole(value) {
  return isNumber(value) ? WHOLE.format(value) : NONE;
}

// Four significant digits, as losses need.
function figure(value) {
  if (!isNumber(value)) return NONE;
  if (Math.abs(value) >= 10000) return whole(value);
  return value !== 0 && Math.abs(value) < 0.001 ? value.toExponential(2) : value.toPrecision(4);
}

function percent(share) {
  return isNumber(share) ? `${Math.round(share * 100)} %` : NONE;
}

function bytes(value) {
  if (!isNumber(value)) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = value < 1 ? 0 : Math.min(units.length - 1, Math.floor(Math.log2(value) / 10));
  const scaled = value / 1024 ** power;
  return `${scaled >= 100 || power === 0 ? Math.round(scaled) : scaled.toFixed(1)} ${units[power]}`;
}

function perSecond(value) {
  return isNumber(value) ? `${bytes(value)}/s` : NONE;
}

// "1 h 04 min", "2 min 05 s", "12.3 s", "3.2 ms".
function duration(seconds) {
  if (!isNumber(seconds)) return NONE;
  if (seconds < 1) return milliseconds(seconds * 1000);
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const rounded = Math.round(seconds);
  const [hours, minutes] = [Math.floor(rounded / 3600), Math.floor((rounded % 3600) / 60)];
  if (hours) return `${hours} h ${String(minutes).padStart(2, "0")} min`;
  return `${minutes} min ${String(rounded % 60).padStart(2, "0")} s`;
}

function milliseconds(value) {
  return `${value < 10 ? value.toFixed(2) : value < 100 ? value.toFixed(1) : whole(value)} ms`;
}

// The same without decimals, for what changes all the time.
function about(seconds) {
  return isNumber(seconds) && seconds < 60 ? `${Math.round(seconds)} s` : duration(seconds);
}

function clock(unixSeconds) {
  return isNumber(unixSeconds) ? new Date(unixSeconds * 1000).toLocaleTimeString("en-GB") : "";
}

export {
  NONE,
  about,
  bytes,
  clock,
  duration,
  figure,
  isNumber,
  milliseconds,
  perSecond,
  percent,
  whole,
};
