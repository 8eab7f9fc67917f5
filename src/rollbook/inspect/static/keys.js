// keys.js: keyboard shortcuts and their list (`?`).
// Invariant: shortcuts do nothing while the user types or a dialog is open; the list shows exactly the active ones.

import { el } from "./dom.js";

let keysPage = [];
let keysGlobal = [];
let keysListening = false;

const keysNames = { " ": "space", Escape: "Esc", ArrowLeft: "←", ArrowRight: "→", ArrowUp: "↑", ArrowDown: "↓", Enter: "⏎" };

function keysTyping(node) {
  if (!node || !node.tagName) return false;
  if (node.isContentEditable || node.tagName === "TEXTAREA" || node.tagName === "SELECT") return true;
  return node.tagName === "INPUT" && !["checkbox", "radio", "button", "range"].includes(node.type);
}

function keysActs(node) {
  return Boolean(node && node.closest && node.closest("button, a[href], summary, input, select, [role=option], [role=tab]"));
}

function keysOf(entry) {
  return Array.isArray(entry.key) ? entry.key : [entry.key];
}

function keysHear(event) {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
  const target = event.target;
  if (document.querySelector("dialog[open]")) return;
  if (keysTyping(target)) {
    if (event.key === "Escape") {
      target.blur();
      event.preventDefault();
    }
    return;
  }
  if ((event.key === "Enter" || event.key === " ") && keysActs(target)) return;
  for (const entry of [...keysPage, ...keysGlobal]) {
    if (!keysOf(entry).includes(event.key)) continue;
    if (entry.run(event) === false) continue;
    event.preventDefault();
    return;
  }
}

/** Sets the keys that work on every page: [{key: "t" or ["j", "ArrowDown"], label, run(event)}]; a run that returns false passes the key on. */
export function setGlobalKeys(list) {
  keysGlobal = list;
  if (!keysListening) document.addEventListener("keydown", keysHear);
  keysListening = true;
}

/** Sets the keys of the open page; they come before the global ones. */
export function setPageKeys(list) {
  keysPage = list || [];
}

// Shortcuts of the page override global ones.
function keysFree(entry) {
  const taken = keysPage.filter((entry) => entry.label).flatMap(keysOf);
  return !keysOf(entry).every((key) => taken.includes(key));
}

function keysRows(list) {
  return list
    .filter((entry) => entry.label)
    .map((entry) =>
      el("div", { class: "key-row" },
        el("dt", null, keysOf(entry).slice(0, 2).map((key, i) => [i ? " " : null, el("kbd", { text: keysNames[key] || key })])),
        el("dd", { text: entry.label })));
}

/** Shows the list of keys. */
export function showKeys(pageTitle) {
  const pageRows = keysRows(keysPage);
  const close = el("button", { class: "button", type: "button", text: "Close", on: { click: () => box.close() } });
  const box = el("dialog", { class: "dialog keys", aria: { label: "Keyboard shortcuts" }, on: { close: () => box.remove(), click: (e) => e.target === box && box.close() } },
    el("div", { class: "dialog-body" },
      el("div", { class: "dialog-head" }, el("h2", { text: "Keyboard shortcuts" }), close),
      pageRows.length ? [el("h3", { text: pageTitle || "This page" }), el("dl", { class: "key-list" }, pageRows)] : null,
      el("h3", { text: "Everywhere" }),
      el("dl", { class: "key-list" }, keysRows(keysGlobal.filter(keysFree)))));
  document.body.append(box);
  box.showModal();
}
