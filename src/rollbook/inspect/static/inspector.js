// The token inspector: everything known of one token, and the tokens that stand out most.
// Invariant: what was not recorded is left out, never shown as zero.

import { el, empty, count, number, visible } from "./dom.js";
import { MASK_BIT, SPECIAL_BIT } from "./frame.js";
import { lensPercentile, lensValues } from "./lenses.js";
import { tokenShown, tokenStart, tokenText, versionChanges } from "./tokens.js";

const INSPECTOR_TOP = 40;
const INSPECTOR_CONTEXT = 48; // characters on either side of the token

function inspectorBytes(text) {
  return Array.from(new TextEncoder().encode(text), (byte) => byte.toString(16).padStart(2, "0")).join(" ");
}

function inspectorQuote(text) {
  return `"${visible(text).replace(/\n/g, "⏎").replace(/\t/g, "⇥")}"`;
}

function inspectorOrdinal(percent) {
  const n = Math.round(percent);
  const last = n % 10;
  const teen = n % 100 >= 11 && n % 100 <= 13;
  return `${n}${teen ? "th" : last === 1 ? "st" : last === 2 ? "nd" : last === 3 ? "rd" : "th"}`;
}

function inspectorValue(trajectory, name, index) {
  const values = trajectory.arrays[name];
  return values === undefined || Number.isNaN(values[index]) ? null : values[index];
}

// What a screen reader says of a token: "token 1,912 of 4,096, ' wait', KL 1.87, 99th percentile".
export function inspectorWords(trajectory, index, lens) {
  const words = [`token ${count(index)} of ${count(trajectory.ends.length)}`, `'${visible(tokenShown(trajectory, index)).replace(/\n/g, "newline")}'`];
  if (lens !== null) {
    const values = lensValues(trajectory, lens);
    const value = values === null ? NaN : values[index];
    if (Number.isFinite(value)) {
      words.push(`${lens.label} ${number(value)}`);
      const place = lensPercentile(trajectory, lens, value);
      if (place !== null) words.push(`${inspectorOrdinal(place.percent)} percentile`);
    } else words.push(`no ${lens.label}`);
  }
  if (!(trajectory.flags[index] & MASK_BIT)) words.push("masked");
  return words.join(", ");
}

/**
 * tokenInspector({trajectory, run, onJump(index)}) -> {element, show(index or null), top(lens), keys}. The table is read out by the
 * page's own live region, so that moving fast does not read twenty rows a second.
 */
export function tokenInspector({ trajectory, run, onJump }) {
  const facts = el("div", { class: "ti-facts" });
  const list = el("ol", { class: "ti-list" });
  const choices = el("div", { class: "ti-by", role: "group", "aria-label": "sort tokens by" });
  const element = el(
    "aside",
    { class: "ti", "aria-label": "token inspector" },
    facts,
    el("section", { class: "ti-top" }, el("h2", { class: "ti-head", text: "Top tokens" }), choices, list),
  );
  const lenses = (run.lenses ?? []).filter((lens) => lensValues(trajectory, lens) !== null);
  const ranked = lenses.filter((lens) => lens.id !== "version");
  let by = null;
  let current = -1;

  function row(label, value, note) {
    return el("div", { class: "ti-row" }, el("dt", { text: label }), el("dd", null,
      el("span", { text: value }), note ? el("span", { class: "ti-note", text: note }) : null));
  }

  function show(index) {
    current = index === null ? -1 : index;
    for (const item of list.querySelectorAll(".ti-item")) item.setAttribute("aria-current", String(Number(item.parentElement.dataset.token) === current));
    if (index === null) {
      empty(facts, el("p", { class: "ti-empty muted" }, "Click a token, or press ", el("kbd", { text: "l" }), " and ", el("kbd", { text: "h" }),
        " to move; ", el("kbd", { text: "]" }), " jumps to the next peak."));
      return;
    }
    const text = tokenText(trajectory, index);
    const start = tokenStart(trajectory, index);
    const end = trajectory.ends[index];
    const rows = [];
    const zero = start === end;
    const logprob = inspectorValue(trajectory, "logprob", index);
    const id = trajectory.ids === null || trajectory.tokenized === "words" ? null : trajectory.ids[index];
    if (id !== null) rows.push(row("id", String(id), trajectory.flags[index] & SPECIAL_BIT ? "special" : ""));
    if (zero) rows.push(row("text", "empty", `part of ${inspectorQuote(tokenShown(trajectory, index))}`));
    else rows.push(row("bytes", inspectorBytes(text).slice(0, 96)));
    for (const lens of lenses) {
      const values = lensValues(trajectory, lens);
      const value = values[index];
      if (!Number.isFinite(value)) continue;
      const place = lensPercentile(trajectory, lens, value);
      let note = place === null ? "" : `${place.of === "run" ? "run pct" : "sample pct"} ${Math.round(place.percent)}`;
      if (lens.id === "logprob") note = `p ${number(Math.exp(value))} · ${note}`;
      if (lens.id === "version") note = versionChanges(trajectory).has(index) ? "changes at this token" : "";
      rows.push(row(lens.label, lens.id === "version" ? String(value) : number(value), note));
    }
    // The reference's own log-prob follows from k3 only up to a sign: it is shown where it was recorded.
    for (const name of Object.keys(trajectory.arrays)) {
      if (lenses.some((lens) => lens.id === name)) continue;
      const value = inspectorValue(trajectory, name, index);
      if (value !== null) rows.push(row(visible(name), number(value)));
    }
    if (logprob === null && lenses.length === 0) rows.push(row("numbers", "none recorded"));
    rows.push(row("mask", trajectory.flags[index] & MASK_BIT ? "trained on" : "masked"));
    if (trajectory.versions !== null && trajectory.versions[index] >= 0 && !lenses.some((lens) => lens.id === "version")) {
      rows.push(row("policy", `v${trajectory.versions[index]}`, versionChanges(trajectory).has(index) ? "changes at this token" : ""));
    }
    const segment = trajectory.segments.find((part) => index >= part.start && index < part.stop);
    if (segment !== undefined) {
      const where = [segment.role, segment.kind === "text" ? "" : segment.kind.replace("_", " "), visible(segment.name)].filter((word) => word !== "").join(" · ");
      rows.push(row("segment", where, segment.role === "assistant" ? `turn ${segment.turn + 1}` : ""));
    }
    const response = index - trajectory.prompt_tokens;
    rows.push(row("position", response < 0 ? "prompt" : `response ${count(response)}`));
    const before = trajectory.text.slice(Math.max(0, start - INSPECTOR_CONTEXT), start);
    const after = trajectory.text.slice(end, end + INSPECTOR_CONTEXT);
    empty(
      facts,
      el("h2", { class: "ti-title" }, `Token #${count(index)} `, el("span", { class: "muted", text: `of ${count(trajectory.ends.length)}` })),
      el("p", { class: "ti-token", text: inspectorQuote(zero ? tokenShown(trajectory, index) : text) }),
      el("dl", { class: "ti-table" }, rows),
      el("p", { class: "ti-context", "aria-label": "context" }, visible(before).replace(/\n/g, "⏎"), el("mark", { text: visible(text).replace(/\n/g, "⏎") }), visible(after).replace(/\n/g, "⏎")),
    );
  }

  function order(lens) {
    by = lens;
    for (const button of choices.children) button.setAttribute("aria-pressed", String(lens !== null && button.dataset.lens === lens.id));
    if (lens === null) {
      empty(list, el("li", { class: "muted", text: "no per-token values to sort by" }));
      return;
    }
    const values = lensValues(trajectory, lens);
    const middle = lens.scale?.kind === "diverging" ? (lens.scale.middle ?? 0) : null;
    const size = lens.id === "ratio" ? (i) => Math.abs(Math.log(values[i])) : lens.id === "logprob" || lens.id === "teacher" ? (i) => -values[i] : middle === null ? (i) => values[i] : (i) => Math.abs(values[i] - middle);
    const best = inspectorTop(values.length, INSPECTOR_TOP, (i) => (Number.isNaN(values[i]) ? -Infinity : size(i)));
    empty(list, best.map((index) => el("li", { data: { token: String(index) } }, el(
      "button",
      { class: "ti-item", type: "button", "aria-current": String(index === current), on: { click: () => onJump(index) } },
      el("span", { class: "ti-item-n", text: `#${count(index)}` }),
      el("span", { class: "ti-item-text", text: inspectorQuote(tokenShown(trajectory, index)) }),
      el("span", { class: "ti-item-value", text: number(values[index]) }),
    ))));
  }

  for (const lens of ranked) {
    choices.append(el("button", { class: "ti-choice", type: "button", text: lens.scale?.kind === "diverging" ? `|${lens.label}|` : lens.label, data: { lens: lens.id }, on: { click: () => order(lens) } }));
  }
  list.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
    const item = event.target.closest("li");
    const next = item === null ? null : event.key === "ArrowDown" ? item.nextElementSibling : item.previousElementSibling;
    event.preventDefault();
    event.stopPropagation();
    if (next !== null) next.firstChild.focus();
  });
  order(ranked.find((lens) => lens.id === "mismatch") ?? ranked.find((lens) => lens.id === "kl") ?? ranked.find((lens) => lens.id === "entropy") ?? ranked[0] ?? null);
  show(null);
  return { element, show, order, by: () => by };
}

// The `most` indices of the highest sizes, highest first.
function inspectorTop(total, most, size) {
  const largest = []; // ascending by size
  for (let i = 0; i < total; i += 1) {
    const itemSize = size(i);
    if (!(itemSize > -Infinity) || (largest.length === most && itemSize <= largest[0][0])) continue;
    let at = 0;
    while (at < largest.length && largest[at][0] < itemSize) at += 1;
    largest.splice(at, 0, [itemSize, i]);
    if (largest.length > most) largest.shift();
  }
  return largest.reverse().map(([, index]) => index);
}
