// filter.js: the filter box: what it can say is suggested while somebody types.
// Invariant: a filter is applied as it was typed; what is wrong with it is said next to it, and the list stays.

import { debounce, el, empty, visible } from "./dom.js";

const filterOperators = {
  number: ["<", "<=", ">", ">=", "=", "!="],
  text: ["=", "!=", "~", "!~"],
  search: ["~", "!~"],
};
const filterWords = ["and", "or", "not"];
const filterStates = { status: ["finished", "truncated", "aborted", "error", "unfinished"], finish_reason: ["stop", "length", "abort", "error"], state: ["waiting", "leased", "trained", "dropped", "evaluation"] };
let filterCount = 0;

/** What may stand at the end of `text`: [{insert, from (where it begins), label, help}]. */
export function filterSuggestions(text, columns) {
  const word = /([A-Za-z_][\w.]*)$/.exec(text);
  const value = /([A-Za-z_][\w.]*)\s*(=|!=|==|~)\s*["']?([\w-]*)$/.exec(text);
  if (value && filterStates[value[1]]) {
    const from = text.length - value[3].length;
    return filterStates[value[1]].filter((s) => s.startsWith(value[3])).map((s) => ({ insert: s + " ", from, label: s, help: value[1] }));
  }
  const begun = word ? word[1].toLowerCase() : "";
  const from = text.length - begun.length;
  const before = text.slice(0, from).trimEnd();
  if (!word) {
    const name = /([A-Za-z_][\w.]*)\s+$/.exec(text);
    const column = name && !filterWords.includes(name[1]) ? columns.find((c) => c.name === name[1]) : null;
    if (column && column.type !== "flag") return (filterOperators[column.type] || filterOperators.number).map((op) => ({ insert: op + " ", from: text.length, label: column.name + " " + op, help: column.help || "" }));
  }
  const needsWord = /[\w"')\]]$/.test(before) && !/\b(and|or|not)$/.test(before);
  if (needsWord) return filterWords.slice(0, 2).filter((w) => w.startsWith(begun)).map((w) => ({ insert: w + " ", from, label: w, help: "" }));
  if (/[<>=~]$/.test(before)) return [];
  const matches = columns.filter((c) => c.name.toLowerCase().includes(begun));
  matches.sort((a, b) => Number(b.name.toLowerCase().startsWith(begun)) - Number(a.name.toLowerCase().startsWith(begun)));
  const list = matches.slice(0, 40).map((c) => ({ insert: c.name + (c.type === "flag" ? " " : ""), from, label: c.name, help: c.help || c.label || "" }));
  if ("not".startsWith(begun)) list.push({ insert: "not ", from, label: "not", help: "negates the next condition" });
  return list;
}

// The filter syntax, and the columns that filters can use.
function filterHelp(columns) {
  const code = (text) => el("code", { text });
  const box = el("dialog", { class: "dialog keys", aria: { label: "Filters" }, on: { close: () => box.remove(), click: (event) => event.target === box && box.close() } },
    el("div", { class: "dialog-body" },
      el("div", { class: "dialog-head" }, el("h2", { text: "Filters" }), el("button", { class: "button", type: "button", text: "Close", on: { click: () => box.close() } })),
      el("p", null, "A column, an operator and a value: ", code("reward < 0.2"), ", ", code("length > 2k"), ", ", code("prompt ~ boxes"), ", ", code("response ~ wait"), " (~ means “contains”). A flag needs no operator: ", code("truncated"),
        ". Combine conditions with ", code("and"), ", ", code("or"), ", ", code("not"), " and parentheses: ", code("step >= 100 and (loop or duplicate)"), "."),
      el("table", { class: "plain names" },
        el("thead", null, el("tr", null, ["Name", "Kind", "Meaning"].map((text) => el("th", { scope: "col", text })))),
        el("tbody", null, columns.map((column) => el("tr", null, el("th", { scope: "row" }, code(visible(column.name))), el("td", { text: visible(column.type) }), el("td", { text: visible(column.help || column.label || "") })))))));
  document.body.append(box);
  box.showModal();
}

/** A filter box. options: {columns, value, onApply(text), placeholder, label}. Returns {root, input, value(), set(text), error(text or null)}. */
export function filterBox(options) {
  const id = "filter-" + (filterCount += 1);
  const list = el("div", { class: "suggestions", id: id + "-list", role: "listbox", tabindex: "-1", aria: { label: "Suggestions" }, hidden: true });
  const input = el("input", {
    class: "input", type: "text", value: options.value || "", placeholder: options.placeholder || "Filter: reward < 0.5 and truncated",
    spellcheck: "false", autocomplete: "off", autocapitalize: "off", role: "combobox",
    aria: { label: options.label || "Filter", expanded: "false", controls: id + "-list", autocomplete: "list", keyshortcuts: ":" },
  });
  const clear = el("button", { class: "button", type: "button", text: "Clear", hidden: !options.value, on: { click: () => {
    set("");
    apply();
    input.focus();
  } } });
  const help = el("button", { class: "icon-button", type: "button", title: "Filter syntax", aria: { label: "Filter syntax" }, text: "?", on: { click: () => filterHelp(options.columns) } });
  const error = el("p", { class: "filter-error", role: "alert", hidden: true });
  let items = [];
  let chosen = -1;
  let applied = options.value || "";

  function close() {
    list.hidden = true;
    chosen = -1;
    input.setAttribute("aria-expanded", "false");
    input.removeAttribute("aria-activedescendant");
  }
  function choose(i) {
    chosen = i;
    [...list.children].forEach((node, at) => node.setAttribute("aria-selected", String(at === i)));
    if (i >= 0) {
      input.setAttribute("aria-activedescendant", id + "-" + i);
      list.children[i].scrollIntoView({ block: "nearest" });
    } else input.removeAttribute("aria-activedescendant");
  }
  function suggest() {
    items = input.selectionStart === input.value.length ? filterSuggestions(input.value, options.columns) : [];
    const exact = items.length === 1 && input.value.slice(items[0].from) === items[0].insert.trim();
    if (!items.length || exact || document.activeElement !== input) {
      close();
      return;
    }
    empty(list, items.map((item, i) =>
      el("div", { class: "suggestion", role: "option", id: id + "-" + i, aria: { selected: "false" }, on: { pointerdown: (event) => {
        event.preventDefault();
        take(i);
      } } }, el("span", { class: "mono", text: visible(item.label) }), el("span", { class: "help", text: visible(item.help) }))));
    list.hidden = false;
    chosen = -1;
    input.setAttribute("aria-expanded", "true");
    input.removeAttribute("aria-activedescendant");
  }
  function take(i) {
    input.value = input.value.slice(0, items[i].from) + items[i].insert;
    input.setSelectionRange(input.value.length, input.value.length);
    suggest();
    later();
  }
  function apply() {
    close();
    const text = input.value.trim();
    clear.hidden = !text;
    if (text === applied) return;
    applied = text;
    options.onApply(text);
  }
  function set(text) {
    input.value = text;
    clear.hidden = !text;
  }
  // A filter that reads whole is applied while somebody types on; a half one waits for Enter.
  const later = debounce(() => {
    const text = input.value.trim();
    if (!text || !/([<>=~(]|\b(and|or|not)|[A-Za-z_])$/.test(text)) {
      if (document.activeElement === input && text !== applied) {
        applied = text;
        clear.hidden = !text;
        options.onApply(text);
      }
    }
  }, 500);
  input.addEventListener("input", () => {
    suggest();
    later();
  });
  input.addEventListener("focus", suggest);
  input.addEventListener("blur", close);
  input.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      if (list.hidden) suggest();
      if (list.hidden) return;
      const by = event.key === "ArrowDown" ? 1 : -1;
      choose((chosen + by + items.length + (chosen < 0 && by < 0 ? 1 : 0)) % items.length);
      event.preventDefault();
    } else if (event.key === "Tab" && !list.hidden && chosen >= 0) {
      take(chosen);
      event.preventDefault();
    } else if (event.key === "Enter") {
      if (!list.hidden && chosen >= 0) take(chosen);
      else apply();
      event.preventDefault();
    } else if (event.key === "Escape") {
      if (list.hidden) set(applied); // what was not applied is given up, and the box is left
      else event.stopPropagation();
      if (!list.hidden) event.preventDefault();
      close();
    }
  });
  input.addEventListener("change", apply);
  return {
    root: el("div", { class: "filter" }, el("div", { class: "filter-line" }, input, clear, help), list, error),
    input,
    value: () => applied,
    set(text) {
      set(text);
      applied = text;
    },
    error(text) {
      error.hidden = !text;
      error.textContent = text ? visible(text) : "";
      if (text) input.setAttribute("aria-invalid", "true");
      else input.removeAttribute("aria-invalid");
    },
  };
}
