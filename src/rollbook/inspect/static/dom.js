// dom.js: create nodes and format numbers.
// Invariant: text from data reaches the page through textContent or an attribute's value, never as markup, a name or a class.

const domSvgSpace = "http://www.w3.org/2000/svg";

function domFill(node, props, children) {
  for (const [name, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") node.setAttribute("class", value);
    else if (name === "text") node.textContent = value;
    else if (name === "on") for (const [event, run] of Object.entries(value)) node.addEventListener(event, run);
    else if (name === "data") for (const [key, item] of Object.entries(value)) domSet(item, (v) => (node.dataset[key] = v));
    else if (name === "aria") for (const [key, item] of Object.entries(value)) domSet(item, (v) => node.setAttribute("aria-" + key, v));
    else if (name === "style") for (const [key, item] of Object.entries(value)) domSet(item, (v) => node.style.setProperty(key, v));
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  domAppend(node, children);
  return node;
}

function domSet(value, put) {
  if (value !== null && value !== undefined) put(String(value));
}

function domAppend(node, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) domAppend(node, child);
    else node.append(child instanceof Node ? child : String(child));
  }
}

/** A sample's named numbers as entries: those that are parts of the run's reward, and the metrics beside it. */
export function splitNumbers(run, numbers) {
  const parts = new Set(run.parts ?? []);
  const entries = Object.entries(numbers ?? {});
  return { parts: entries.filter(([name]) => parts.has(name)), metrics: entries.filter(([name]) => !parts.has(name)) };
}

/** An HTML element. props: class, text, on {event: f}, data {key: value}, aria {name: value}, style {property: value}, else attributes. */
export function el(tag, props, ...children) {
  return domFill(document.createElement(tag), props, children);
}

/** An SVG element, with the same props. */
export function svg(tag, props, ...children) {
  return domFill(document.createElementNS(domSvgSpace, tag), props, children);
}

/** Replaces what a node holds. */
export function empty(node, ...children) {
  node.replaceChildren();
  domAppend(node, children);
  return node;
}

// Characters that reorder, hide or control: bidi marks, zero widths, C0 and C1 but tab and newline, unseen line breaks, tags.
const domHidden = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u115f\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|\udb40[\udc00-\udc7f]/g;

/** Text with the characters that deceive the eye written out, as ⟦U+202E⟧. Every text that comes from data goes through it. */
export function visible(text) {
  return String(text === null || text === undefined ? "" : text).replace(
    domHidden,
    (c) => "⟦U+" + c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0") + "⟧",
  );
}

/** A number to read: `digits` decimals where given, else about three figures; "–" for what is missing. */
export function number(x, digits) {
  if (x === null || x === undefined || !Number.isFinite(x)) return "–";
  const size = Math.abs(x);
  let text;
  if (digits !== undefined) text = x.toFixed(digits);
  else if (size === 0) text = "0";
  else if (size < 0.001) text = x.toExponential(1);
  else if (size < 1) text = x.toFixed(3);
  else if (size < 10) text = x.toFixed(2);
  else if (size < 100) text = x.toFixed(1);
  else if (size < 1e6) return count(Math.round(x));
  else text = (x / 1e6).toFixed(1) + "M";
  if (/^-0(\.0*)?$/.test(text)) text = text.slice(1);
  return text.replace("-", "−");
}

/** A number in few characters, for axes and lengths: 950, 2.1k, 1.3M. */
export function compact(x) {
  if (x === null || x === undefined || !Number.isFinite(x)) return "–";
  const size = Math.abs(x);
  if (size >= 999500) return domTrim((x / 1e6).toFixed(size >= 1e7 ? 0 : 1)) + "M";
  if (size >= 1000) return domTrim((x / 1e3).toFixed(size >= 99500 ? 0 : 1)) + "k";
  if (size >= 100 || Number.isInteger(x)) return String(Math.round(x)).replace("-", "−");
  if (size >= 1) return domTrim(x.toFixed(size >= 10 ? 1 : 2)).replace("-", "−");
  if (size === 0) return "0";
  return (size < 0.001 ? x.toExponential(0) : domTrim(x.toFixed(3))).replace("-", "−");
}

function domTrim(text) {
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

/** A share as 31%; small shares keep a digit, so that 0.4% is not 0%. */
export function percent(x) {
  if (x === null || x === undefined || !Number.isFinite(x)) return "–";
  const value = x * 100;
  return (value !== 0 && Math.abs(value) < 9.95 && !Number.isInteger(value) ? value.toFixed(1) : value.toFixed(0)) + "%";
}

/** A share of a step's summary; null where the step has nothing that it could be a share of. */
export function stepShare(step, name) {
  const needs = { zero_variance: "reward", solved: "reward", all_solved: "reward", stale: "staleness" }[name];
  return step[name] === undefined || (needs && !step[needs]) ? null : step[name];
}

/** A whole number with its thousands marked: 70,656. */
export function count(n) {
  if (n === null || n === undefined || !Number.isFinite(n)) return "–";
  return Math.round(n).toLocaleString("en-US").replace("-", "−");
}

/** "1 sample", "512 samples". */
export function plural(n, singular, pluralForm) {
  return count(n) + " " + (n === 1 ? singular : pluralForm || singular + "s");
}

/** How long ago a time (seconds since 1970) was. */
export function ago(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  const past = Math.max(0, Date.now() / 1000 - seconds);
  if (past < 60) return "just now";
  if (past < 3600) return Math.floor(past / 60) + " min ago";
  if (past < 86400) return Math.floor(past / 3600) + " h ago";
  return plural(Math.floor(past / 86400), "day") + " ago";
}

/** A theme's color for a canvas, by the name of its CSS variable ("--accent"). */
export function themeColor(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim() || "#808080";
}

/** Runs `act` once, `wait` milliseconds after the last call. */
export function debounce(act, wait) {
  let timer = 0;
  return (...args) => {
    clearTimeout(timer);
    timer = setTimeout(() => act(...args), wait);
  };
}

let domTip = null;

/** Explains a node while the pointer is on it or it has the focus; screen readers read the text with it. */
export function explain(node, title, text) {
  const show = () => {
    hide();
    domTip = el("div", { class: "tip", role: "tooltip" }, el("p", { class: "tip-title", text: title }), el("p", { text }));
    document.body.append(domTip);
    const at = node.getBoundingClientRect();
    const tipBox = domTip.getBoundingClientRect();
    const under = at.bottom + tipBox.height + 8 < window.innerHeight;
    domTip.style.setProperty("left", Math.max(8, Math.min(at.left, window.innerWidth - tipBox.width - 8)) + "px");
    domTip.style.setProperty("top", (under ? at.bottom + 6 : at.top - tipBox.height - 6) + "px");
  };
  const hide = () => {
    if (domTip) domTip.remove();
    domTip = null;
  };
  node.addEventListener("pointerenter", show);
  node.addEventListener("focus", show);
  node.addEventListener("pointerleave", hide);
  node.addEventListener("blur", hide);
  node.addEventListener("keydown", (event) => event.key === "Escape" && hide());
  return node;
}

const domIcons = {
  sun: ["M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8z", "M12 2v3M12 19v3M2 12h3M19 12h3M5 5l2 2M17 17l2 2M5 19l2-2M17 7l2-2"],
  moon: ["M20 14.5A8.5 8.5 0 0 1 9.5 4a8.5 8.5 0 1 0 10.5 10.5z"],
  system: ["M3 5h18v12H3zM8 21h8M12 17v4"],
  palette: ["M12 3a9 9 0 1 0 0 18c1.5 0 2-1 2-2s-1-1.5-1-2.5 1-1.5 2-1.5h2.5A3.5 3.5 0 0 0 21 11.5C21 7 17 3 12 3z", "M7.5 11h.01M10 7h.01M15 7.5h.01"],
  search: ["M11 4a7 7 0 1 0 0 14 7 7 0 0 0 0-14zM16 16l5 5"],
  left: ["M15 5l-7 7 7 7"],
  right: ["M9 5l7 7-7 7"],
  star: ["M12 3l2.7 5.8 6.3.8-4.6 4.4 1.2 6.3L12 17.2 6.4 20.3l1.2-6.3L3 9.6l6.3-.8z"],
  table: ["M4 5h16v14H4zM4 10h16M4 14.5h16M10 5v14"],
  chart: ["M4 4v16h16M7 15l4-5 3 3 5-7"],
  download: ["M12 4v11M7 11l5 5 5-5M5 20h14"],
  close: ["M6 6l12 12M18 6L6 18"],
  high: ["M12 3l10 18H2zM12 10v5M12 17.5v.5"],
  medium: ["M12 3a9 9 0 1 0 0 18 9 9 0 0 0 0-18zM12 7.5v6M12 16v.5"],
  low: ["M12 3a9 9 0 1 0 0 18 9 9 0 0 0 0-18zM12 11v5.5M12 7.5v.5"],
  check: ["M5 12.5l4.5 4.5L19 7.5"],
  lock: ["M6 11h12v9H6zM8.5 11V8a3.5 3.5 0 0 1 7 0v3"],
  image: ["M4 5h16v14H4zM4 16l5-5 4 4 2-2 5 5M15.5 9h.01"],
};

/** A small line drawing by name (sun, moon, star, …), hidden from screen readers. */
export function icon(name) {
  return svg(
    "svg",
    { class: "icon", viewBox: "0 0 24 24", fill: "none", stroke: "currentColor", "stroke-width": "2", "stroke-linecap": "round",
      "stroke-linejoin": "round", "aria-hidden": "true" },
    (domIcons[name] || []).map((d) => svg("path", { d })),
  );
}

/** What a page shows where there is nothing to show: what is missing, and what to do about it. */
export function emptyState(title, ...advice) {
  return el("div", { class: "empty-state" }, el("p", { class: "empty-title", text: title }), advice.map((a) => (a instanceof Node ? a : el("p", { text: a }))));
}
