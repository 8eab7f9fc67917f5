// search.js: text found in prompts and responses.
// Invariant: what is searched for, how and where is in the address; a search that did not see everything says so.

import { count, el, empty, emptyState, number, plural, visible } from "../dom.js";

const searchModes = [
  ["phrase", "Words", "whole words in sequence; all quoted phrases must match"],
  ["substring", "Anywhere", "substring, case-insensitive"],
  ["regex", "Regex", "Python regular expression, with a time limit"],
];
const searchPage = 100; // hits shown at first, and added by each press of the button
const searchMost = 1000;

// What is found is shown with its spaces, but on one line: breaks as a sign.
function searchFlat(text) {
  return visible(text).replace(/\s*\n\s*/g, " ⏎ ");
}

function searchHit(context, row) {
  const { before, match, after } = row.snippet;
  const where = row.field === "prompt" ? "prompt" : "response";
  return el("li", { class: "hit" },
    el("a", { class: "hit-link", href: context.link("t", row.uid, { q: match }) },
      el("span", { class: "hit-text" }, el("span", { class: "muted", text: before ? "…" : "" }), searchFlat(before), el("mark", { text: searchFlat(match) }), searchFlat(after), el("span", { class: "muted", text: after ? "…" : "" })),
      el("span", { class: "hit-head" },
        el("span", { class: "hit-id", text: visible(row.uid) }),
        el("span", { text: "step " + row.step }),
        el("span", { text: "reward " + number(row.reward) }),
        el("span", { class: "chip", text: where }))));
}

/** Opens the search. */
export async function openSearch(context) {
  const { root, params, api } = context;
  const box = el("input", { type: "search", class: "input wide", value: params.get("q", ""), placeholder: "Search prompts and responses", aria: { label: "Search for" }, autocomplete: "off", spellcheck: "false", maxlength: "1000" });
  const step = el("input", { type: "number", class: "input jump", value: params.get("step", ""), min: "0", placeholder: "All steps", aria: { label: "Only in step" } });
  let mode = searchModes.some(([id]) => id === params.get("mode")) ? params.get("mode") : "phrase";
  let limit = Math.max(searchPage, Math.min(searchMost, Number(params.get("limit", 0)) || searchPage));
  const help = el("p", { class: "muted search-help" });
  const buttons = searchModes.map(([id, label, words]) => el("button", { type: "button", text: label, title: words, on: { click: () => setMode(id) } }));
  const state = el("p", { class: "muted search-note", role: "status" });
  const results = el("ol", { class: "hits panel", aria: { label: "Results" }, hidden: true });
  const note = el("div", { class: "search-note" });
  const more = el("button", { class: "button", type: "button", text: "Show more", hidden: true, on: { click: () => {
    limit = Math.min(searchMost, limit + searchPage * (limit > searchPage ? 4 : 1));
    find(false);
  } } });
  const form = el("form", { class: "panel panel-body search-page", role: "search", aria: { label: "Search in texts" }, on: { submit: (event) => {
    event.preventDefault();
    limit = searchPage;
    find(true);
  } } },
    el("div", { class: "search-line" }, box, el("div", { class: "segmented", role: "group", aria: { label: "Search mode" } }, buttons), step, el("button", { class: "button primary", type: "submit", text: "Search" })), help);
  const links = () => [...results.querySelectorAll(".hit-link")];
  let shown = []; // the rows of the links
  let turn = 0;
  let abort = null;
  let timer = 0;

  function paintMode() {
    searchModes.forEach(([id, , words], i) => {
      buttons[i].setAttribute("aria-pressed", String(id === mode));
      if (id === mode) help.textContent = words[0].toUpperCase() + words.slice(1) + ".";
    });
    box.classList.toggle("mono", mode === "regex");
  }
  function setMode(id) {
    mode = id;
    paintMode();
    if (box.value.trim()) find(true);
    else params.set({ mode: mode === "phrase" ? null : mode });
  }
  function stop() {
    clearTimeout(timer);
    if (abort) abort.abort();
  }
  function show(rows) {
    // The list may grow while texts are still being read: who stands on a result stays on it.
    const here = shown[links().indexOf(document.activeElement)];
    shown = rows;
    empty(results, rows.map((row) => searchHit(context, row)));
    results.hidden = !rows.length;
    const again = here ? rows.findIndex((row) => row.uid === here.uid && row.field === here.field) : -1;
    if (again >= 0) links()[again].focus({ preventScroll: true });
  }

  async function find(push) {
    stop();
    const q = box.value;
    params.set({ q: q || null, mode: mode === "phrase" ? null : mode, step: step.value || null, limit: limit > searchPage ? limit : null }, { push });
    empty(note);
    more.hidden = true;
    if (!q.trim()) {
      show([]);
      state.textContent = "";
      return;
    }
    await ask(q, (turn += 1), true);
  }
  async function ask(q, mine, first) {
    abort = new AbortController();
    const late = setTimeout(() => mine === turn && (state.textContent = "Searching…"), first ? 150 : 60000);
    try {
      const answer = await api.json("/api/search", { q, mode, limit, step: step.value || null }, abort.signal);
      if (mine !== turn || context.closed) return;
      let words = answer.rows.length === 0 ? "No results" : answer.total === null ? "The first " + plural(answer.rows.length, "match", "matches") : answer.total > answer.rows.length ? "The first " + count(answer.rows.length) + " of " + plural(answer.total, "match", "matches") : plural(answer.total, "match", "matches");
      words += ", newest step first · " + number(answer.milliseconds, 1) + " ms";
      if (answer.mode && answer.mode !== mode) words += " · substring search: this script does not separate words";
      show(answer.rows);
      more.hidden = answer.rows.length < limit || limit >= searchMost || answer.rows.length === answer.total;
      if (!answer.complete) {
        const progress = (await api.json("/api/run")).progress;
        if (mine !== turn || context.closed) return;
        words += " · indexing texts: " + count(progress.searchable) + " of " + count(progress.total) + " searched";
        timer = setTimeout(() => mine === turn && !context.closed && ask(q, mine, false), 1500);
      } else if (!answer.rows.length) {
        empty(note, el("section", { class: "panel" }, emptyState("No results", mode === "phrase" ? "“Words” matches whole words. Use “Anywhere” for substrings." : mode === "regex" ? "Regular expressions are case-sensitive; start with (?i) to ignore case." : "No text contains this substring.", step.value ? "Only step " + step.value + " was searched." : null)));
      } else empty(note);
      state.textContent = words;
      if (first) context.announce(words);
    } catch (error) {
      if (mine !== turn || context.closed || error.name === "AbortError") return;
      show([]);
      state.textContent = "";
      empty(note, el("section", { class: "panel search-error", role: "alert" },
        el("p", { class: "bad", text: error.status === 504 ? "The search timed out" : error.status === 429 ? "Other searches are still running" : "Invalid search" }),
        el("p", { class: "mono", text: visible(error.message) }),
        error.status === 504 ? el("p", { class: "muted", text: "Nested repeats such as (a+)+ can take exponential time. Simplify the pattern, or search a single step." }) : null));
    } finally {
      clearTimeout(late);
    }
  }

  paintMode();
  empty(root, el("h1", { text: "Search" }), form, state, note, results, more);
  if (params.get("q")) {
    await find(false);
    if (!context.closed && shown.length && document.activeElement !== box) links()[0].focus({ preventScroll: true });
  } else box.focus();

  function move(by) {
    const all = links();
    if (!all.length) return false;
    const at = all.indexOf(document.activeElement);
    const next = all[Math.max(0, Math.min(all.length - 1, at < 0 ? 0 : at + by))];
    next.focus({ preventScroll: true });
    next.scrollIntoView({ block: "nearest" });
    return true;
  }
  box.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" && move(0)) event.preventDefault();
  });
  return {
    title: params.get("q") ? "Search: " + visible(params.get("q")).slice(0, 40) : "Search",
    crumbs: [{ text: "search" }],
    keys: [
      { key: ["j", "ArrowDown"], label: "next result", run: () => move(1) },
      { key: ["k", "ArrowUp"], label: "previous result", run: () => move(-1) },
      { key: "/", label: "focus the search box", run: () => {
        box.focus();
        box.select();
      } },
      { key: "m", label: "mode: words, anywhere, regex", run: () => setMode(searchModes[(searchModes.findIndex(([id]) => id === mode) + 1) % searchModes.length][0]) },
    ],
    close: stop,
  };
}
