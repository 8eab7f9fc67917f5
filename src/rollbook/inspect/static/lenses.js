// Lenses: what a token's color means, on scales fixed for the run.
// Invariant: a value has the same color on every page and in every sample, until a person pins another domain.

import { compact, el, empty, number } from "./dom.js";

export const LENS_NONE = 63; // no value
export const LENS_OVER = 16; // beyond the domain's high end: the color of bucket 15, underlined more
export const LENS_UNDER = 17; // below a diverging domain: the color of bucket 0

const lensKept = new WeakMap(); // trajectory -> {key of lens and domain: codes}

function lensIdentity(value) {
  return value;
}

function lensNegative(value) {
  return -value;
}

// Color is by these: a log-prob as surprise, a ratio by its logarithm (0.5 and 2 are equally far from 1).
function lensShown(lens) {
  if (lens.id === "logprob" || lens.id === "teacher") return lensNegative;
  if (lens.id === "ratio") return Math.log;
  return lensIdentity;
}

// The number a person reads for a place on the scale.
function lensRead(lens) {
  if (lens.id === "ratio") return Math.exp;
  return lensIdentity;
}

// lensScale(lens, low, high) -> {kind, low, high, middle, pinned} in the units that color is by; low and high are the
// person's own ends as read (strings or numbers), or null.
export function lensScale(lens, low = null, high = null) {
  const domain = lens.scale ?? {};
  const kind = domain.kind === "diverging" ? "diverging" : "sequential";
  const readBound = (value) => {
    const parsed = lensNumber(value);
    return parsed === null || (lens.id === "ratio" && parsed <= 0) ? null : parsed;
  };
  const pinnedLow = readBound(low);
  const pinnedHigh = readBound(high);
  const place = lens.id === "ratio" ? Math.log : lensIdentity;
  let from = place(domain.low ?? 0);
  let to = place(domain.high ?? 1);
  // The server gives the domain of a log-prob as it is recorded; color is by surprise, its negative.
  if (lensShown(lens) === lensNegative) [from, to] = [-to + 0, -from + 0];
  if (pinnedLow !== null) from = place(pinnedLow);
  if (pinnedHigh !== null) to = place(pinnedHigh);
  const middle = kind === "diverging" ? place(domain.middle ?? (lens.id === "ratio" ? 1 : 0)) : null;
  if (!Number.isFinite(from)) from = kind === "diverging" ? -1 : 0;
  if (!Number.isFinite(to)) to = 1;
  if (kind === "diverging") {
    // Both sides reach equally far, so that equal distances have equal strength: the end that was pinned decides.
    const reach = pinnedLow !== null && pinnedHigh === null ? Math.abs(from - middle) : pinnedHigh !== null && pinnedLow === null
      ? Math.abs(to - middle) : Math.max(Math.abs(from - middle), Math.abs(to - middle));
    from = middle - (reach || 1);
    to = middle + (reach || 1);
  } else if (!(to > from)) {
    to = from + 1;
  }
  return { kind, low: from, high: to, middle, pinned: pinnedLow !== null || pinnedHigh !== null };
}

export function lensNumber(text) {
  if (text === null || text === undefined || String(text).trim() === "") return null;
  const value = Number(text);
  return Number.isFinite(value) ? value : null;
}

// The values of a lens, one a token, as recorded; null where the trajectory has none.
export function lensValues(trajectory, lens) {
  const values = trajectory.arrays[lens.id];
  if (values !== undefined) return values;
  if (lens.id === "version" && trajectory.versions !== null) {
    return Float32Array.from(trajectory.versions, (version) => (version < 0 ? NaN : version));
  }
  return null;
}

// lensCodes(trajectory, lens, scale) -> Uint8Array, a bucket (0..15, OVER, UNDER, NONE) for each token.
export function lensCodes(trajectory, lens, scale) {
  let cached = lensKept.get(trajectory);
  if (cached === undefined) {
    cached = new Map();
    lensKept.set(trajectory, cached);
  }
  const key = `${lens.id} ${scale.kind} ${scale.low} ${scale.high}`;
  if (cached.has(key)) return cached.get(key);
  const values = lensValues(trajectory, lens);
  if (values === null) return null;
  const shown = lensShown(lens);
  const codes = new Uint8Array(values.length);
  const { low, high } = scale;
  const factor = 16 / (high - low);
  const under = scale.kind === "diverging" ? LENS_UNDER : 0;
  for (let i = 0; i < values.length; i += 1) {
    const value = values[i];
    if (value !== value) {
      codes[i] = LENS_NONE;
      continue;
    }
    const place = shown(value);
    let code;
    if (place > high) code = LENS_OVER;
    else if (place < low) code = under;
    else code = Math.min(15, Math.floor((place - low) * factor));
    codes[i] = code;
  }
  if (cached.size > 12) cached.delete(cached.keys().next().value);
  cached.set(key, codes);
  return codes;
}

// How far from quiet a code is: 0 is left as plain text. Pooling and "next high token" go by it.
export function lensRank(code, diverging) {
  if (code === LENS_NONE) return 0;
  if (!diverging) return code;
  if (code >= LENS_OVER) return 8;
  return code >= 8 ? code - 8 : 7 - code;
}

// The color's number 0..15 of a code (OVER and UNDER have the colors of the ends).
export function lensColor(code) {
  return code === LENS_OVER ? 15 : code === LENS_UNDER ? 0 : code;
}

// Tokens of [from, to) that stand out: in the upper quarter of the colors, else the strongest there are; ascending.
export function lensPeaks(codes, scale, from, to) {
  const diverging = scale.kind === "diverging";
  let top = 0;
  for (let i = from; i < to; i += 1) top = Math.max(top, lensRank(codes[i], diverging));
  const least = Math.max(1, Math.min(top, diverging ? 6 : 12));
  const peaks = [];
  for (let i = from; i < to; i += 1) if (lensRank(codes[i], diverging) >= least) peaks.push(i);
  return peaks;
}

// lensPercentile(trajectory, lens, value) -> {percent, of}: of the run where the server sent its quantiles, else of the
// sample. Sorted values are kept: the cursor asks at every step.
const lensSorted = new WeakMap();
export function lensPercentile(trajectory, lens, value) {
  if (!Number.isFinite(value)) return null;
  const quantiles = lens.scale?.quantiles;
  if (Array.isArray(quantiles) && quantiles.length > 1) {
    return { percent: (100 * lensBelow(quantiles, value)) / quantiles.length, of: "run" };
  }
  let cached = lensSorted.get(trajectory);
  if (cached === undefined) {
    cached = {};
    lensSorted.set(trajectory, cached);
  }
  if (cached[lens.id] === undefined) {
    cached[lens.id] = (lensValues(trajectory, lens) ?? new Float32Array()).filter((x) => Number.isFinite(x)).sort();
  }
  const sorted = cached[lens.id];
  if (sorted.length < 2) return null;
  return { percent: (100 * lensBelow(sorted, value)) / sorted.length, of: "sample" };
}

// How many of the ascending values are at or below `value`.
function lensBelow(sorted, value) {
  let low = 0;
  let high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low;
}

// Why a trajectory cannot be seen through a lens, or "".
export function lensReason(trajectories, lens) {
  if (trajectories.some((trajectory) => lensValues(trajectory, lens) !== null)) return "";
  return `${lens.label}: not recorded for ${trajectories.length === 1 ? "this sample" : "these samples"}`;
}

// The lens that a page opens with: the one asked for, else entropy, else the first there is, else none.
export function lensChosen(run, trajectories, preferred) {
  if (preferred === "off") return null;
  const usable = (run.lenses ?? []).filter((lens) => lensReason(trajectories, lens) === "");
  return usable.find((lens) => lens.id === preferred) ?? usable.find((lens) => lens.id === "entropy") ?? usable[0] ?? null;
}

// lensBar({run, trajectories, params, onChange}) -> {element, lens(), scale(), choose(id), keys}: the buttons, the legend
// with its domain, and the fields that pin it. onChange(lens or null, scale or null).
export function lensBar({ run, trajectories, params, onChange }) {
  const lenses = run.lenses ?? [];
  let lens = lensChosen(run, trajectories, params.get("lens", null));
  let scale = lens === null ? null : lensScale(lens, params.get("lo", null), params.get("hi", null));
  const buttons = new Map();
  const row = el("div", { class: "lens-buttons", role: "group", "aria-label": "color tokens by lens" });
  const legend = el("div", { class: "lens-legend" });
  const element = el("div", { class: "lens-bar" }, row, legend);

  function add(id, key, label, help, reason) {
    const button = el(
      "button",
      {
        class: "lens-button", type: "button", title: reason === "" ? help : reason, disabled: reason === "" ? null : "",
        on: { click: () => choose(id) },
      },
      key === null ? null : el("kbd", { text: key }),
      el("span", { text: label }),
    );
    buttons.set(id, button);
    row.append(button);
  }
  for (const option of lenses) {
    add(option.id, option.key ? String(option.key) : null, option.label, option.help ?? option.label, lensReason(trajectories, option));
  }
  add("off", "0", "off", "plain text", "");

  function choose(id) {
    const next = id === "off" ? null : lenses.find((candidate) => candidate.id === id);
    if (next === undefined || (next !== null && lensReason(trajectories, next) !== "")) return;
    lens = next;
    scale = lens === null ? null : lensScale(lens);
    params.set({ lens: lens === null ? "off" : lens.id, lo: null, hi: null });
    changed();
  }

  function pin(low, high) {
    scale = lensScale(lens, low, high);
    params.set({ lo: lensNumber(low) === null ? null : String(low), hi: lensNumber(high) === null ? null : String(high) });
    changed();
  }

  function changed() {
    draw();
    onChange(lens, scale);
  }

  function draw() {
    for (const [id, button] of buttons) {
      button.setAttribute("aria-pressed", String(id === (lens === null ? "off" : lens.id)));
    }
    if (lens === null) {
      empty(legend, el("span", { class: "muted", text: lenses.length === 0 ? "no per-token values recorded" : "" }));
      return;
    }
    const read = lensRead(lens);
    const field = (label, value, keep) =>
      el("input", {
        class: "lens-end", type: "text", inputmode: "decimal", size: "5", value: compact(value).replace("−", "-"), "aria-label": label,
        title: `${label}; enter a number to fix it, empty for the run's value`,
        on: { change: (event) => keep(event.target.value) },
      });
    const low = read(scale.low);
    const high = read(scale.high);
    const ramp = el("span", { class: "lens-ramp", role: "img", "aria-label": `16 colors from ${number(low, 3)} to ${number(high, 3)}` });
    const prefix = scale.kind === "diverging" ? "tq-d" : "tq-s";
    for (let bucket = 0; bucket < 16; bucket += 1) {
      const from = read(scale.low + ((scale.high - scale.low) * bucket) / 16);
      const to = read(scale.low + ((scale.high - scale.low) * (bucket + 1)) / 16);
      ramp.append(el("span", { class: `lens-cell ${prefix}${bucket}`, title: `${number(from, 3)} to ${number(to, 3)}` }));
    }
    empty(
      legend,
      field("low end of the color scale", low, (text) => pin(text, params.get("hi", null))),
      ramp,
      field("high end of the color scale", high, (text) => pin(params.get("lo", null), text)),
      scale.pinned
        ? el("button", { class: "lens-unpin", type: "button", text: "unpin", title: "reset to the run's scale", on: { click: () => pin(null, null) } })
        : el("span", { class: "muted lens-note", text: "run p1–p99", title: "The color scale spans the 1st to 99th percentile of this run and is the same on every page." }),
      lensShown(lens) === lensNegative ? el("span", { class: "muted lens-note", text: "colored by surprise, −log p" }) : null,
    );
  }
  draw();

  const keys = lenses
    .filter((option) => option.key)
    .map((option) => ({ key: String(option.key), label: `color by ${option.label}`, run: () => choose(option.id) }));
  keys.push({ key: "0", label: "no colors", run: () => choose("off") });
  return { element, lens: () => lens, scale: () => scale, choose, keys };
}
