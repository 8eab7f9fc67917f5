// sql.js: questions in SQL over the book.
// Invariant: a query is run when the reader says so, never because an address was opened.

import { count, el, empty, emptyState, number, plural, visible } from "../dom.js";

const sqlExamples = [
  ["Reward by step", "select train_step, count(*) as n, round(avg(reward), 3) as reward,\n       round(avg(response_tokens), 1) as tokens\nfrom training\ngroup by all\norder by train_step desc"],
  ["Truncated but rewarded", "select uid, gid, train_step, round(reward, 3) as reward, response_tokens\nfrom experiences\nwhere finish_reason = 'length' and reward > 0.5\norder by reward desc"],
  ["Parts of the reward", "select train_step,\n       round(avg((metrics->>'accuracy')::double), 3) as accuracy,\n       round(avg((metrics->>'format')::double), 3) as format\nfrom training\ngroup by all\norder by train_step"],
  ["Zero-variance groups", "select gid, count(*) as n, avg(reward) as reward\nfrom training\ngroup by gid\nhaving count(*) > 1 and max(reward) - min(reward) < 1e-6\norder by gid"],
  ["Highest-entropy tokens", "select uid, unnest(entropy) as entropy, generate_subscripts(entropy, 1) - 1 as place\nfrom experiences\norder by entropy desc\nlimit 50"],
  ["Record outcomes", "select kind, reason, count(*) as n\nfrom ledger\ngroup by all\norder by n desc"],
];
const sqlTables = [
  ["experiences", "one row per record: uid, gid, train_step, task, run, reward, response_tokens, finish_reason, metrics and info (JSON), tokens, logprobs, entropy and advantages (lists)"],
  ["training", "training records"],
  ["evaluations", "evaluation records"],
  ["metrics", "one row per logged metric: train_step, name, value"],
  ["ledger", "one row per event: time, uid, kind, reason, consumer, step"],
  ["queue", "state of each record per consumer"],
  ["leases", "lease holders and expiry times"],
  ["revisions", "later changes of records"],
  ["checkpoints", "restore points"],
  ["media", "images, by hash"],
];
const sqlFirst = 1000; // rows asked for at first
const sqlMost = 10000;
const sqlPiece = 250; // rows that are made at a time, as the reader scrolls
const sqlShort = 200; // letters of a cell before it is opened
const sqlLong = 20000;
const sqlKept = 12;

function sqlText(value) {
  return value === null ? "" : typeof value === "object" ? JSON.stringify(value) : String(value);
}

function sqlCell(context, name, value) {
  if (name === "uid" && typeof value === "string") return el("td", null, el("a", { href: context.link("t", value), text: visible(value) }));
  if ((name === "tid" || name === "gid") && typeof value === "string") return el("td", null, el("a", { href: context.link("group", value), text: visible(value) }));
  if (value === null) return el("td", { class: "muted", text: "null" });
  const text = sqlText(value);
  if (typeof value === "number" || typeof value === "boolean") return el("td", { class: "num", text });
  if (text.length <= sqlShort && !text.includes("\n")) return el("td", { text: visible(text) });
  const cut = () => visible(text.slice(0, sqlShort).replace(/\s+/g, " ")) + (text.length > sqlShort ? "…" : "");
  const button = el("button", { class: "sql-long", type: "button", title: "Show all", aria: { expanded: "false" }, text: cut(), on: { click: () => {
    const open = button.getAttribute("aria-expanded") !== "true";
    button.setAttribute("aria-expanded", String(open));
    button.textContent = open ? visible(text.slice(0, sqlLong)) + (text.length > sqlLong ? "… (" + plural(text.length, "letter") + ")" : "") : cut();
  } } });
  return el("td", null, button);
}

function sqlRecent(run) {
  const key = "rollbook.sql." + run.name;
  try {
    const queries = JSON.parse(localStorage.getItem(key) || "[]").filter((query) => typeof query === "string");
    return { all: () => queries, add(query) {
      const at = queries.indexOf(query);
      if (at >= 0) queries.splice(at, 1);
      queries.unshift(query);
      queries.splice(sqlKept);
      localStorage.setItem(key, JSON.stringify(queries));
    } };
  } catch {
    return { all: () => [], add: () => {} }; // a browser that keeps nothing
  }
}

/** Opens the SQL page. */
export async function openSql(context) {
  const { root, params, api, run } = context;
  if (!(run.features || {}).sql) {
    empty(root, el("h1", { text: "SQL" }), el("section", { class: "panel" }, emptyState("SQL is not available", run.kind === "book" ? "Requires duckdb: install the extra 'sql' of Rollbook." : "SQL works on books. Import the files first: rollbook import BOOK FILE, then rollbook view BOOK.")));
    return { title: "SQL", crumbs: [{ text: "SQL" }] };
  }
  const recent = sqlRecent(run);
  const box = el("textarea", { class: "sql-box", rows: "9", spellcheck: "false", autocomplete: "off", autocapitalize: "off", aria: { label: "SQL", keyshortcuts: "Control+Enter" } });
  box.value = params.get("q", sqlExamples[0][1]);
  const hasQuery = params.get("q") !== undefined;
  const state = el("span", { class: "muted", role: "status" });
  const button = el("button", { class: "button primary", type: "button", on: { click: () => ask(sqlFirst) } }, "Run", el("kbd", { text: "Ctrl ⏎", aria: { hidden: "true" } }));
  const save = el("button", { class: "button small", type: "button", text: "CSV", title: "Save as CSV, at most " + count(sqlMost) + " rows", hidden: true, on: { click: csv } });
  const more = el("button", { class: "button small", type: "button", text: "Up to " + count(sqlMost) + " rows", hidden: true, on: { click: () => ask(sqlMost) } });
  const facts = el("span", { class: "muted" });
  const result = el("div", { class: "sql-result", tabindex: "0", role: "region", aria: { label: "Rows" } });
  let shownQuery = null; // the query whose rows are shown
  let busy = false;
  let watch = null;
  box.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    ask(sqlFirst);
  });
  box.addEventListener("input", () => params.set({ q: box.value }));
  const put = (text) => {
    box.value = text;
    params.set({ q: text });
    box.focus();
  };

  function grid(answer) {
    const body = el("tbody");
    const end = el("tr", { class: "sql-end" }, el("td", { colspan: String(Math.max(1, answer.columns.length)) }));
    let shownCount = 0;
    const add = () => {
      const rows = answer.rows.slice(shownCount, shownCount + sqlPiece);
      shownCount += rows.length;
      end.before(...rows.map((row) => el("tr", null, row.map((value, i) => sqlCell(context, answer.columns[i], value)))));
      if (shownCount >= answer.rows.length) {
        watch.disconnect();
        end.remove();
      }
    };
    if (watch) watch.disconnect();
    watch = new IntersectionObserver((seen) => seen.some((entry) => entry.isIntersecting) && add(), { root: result, rootMargin: "600px" });
    body.append(end);
    add();
    if (end.isConnected || end.parentNode) watch.observe(end);
    return el("table", { class: "plain-grid", aria: { label: "Result", rowcount: String(answer.rows.length + 1) } },
      el("thead", null, el("tr", null, answer.columns.map((name, i) => el("th", { scope: "col", class: ["number", "boolean"].includes(typeof (answer.rows.find((row) => row[i] !== null) || [])[i]) && !["uid", "gid", "tid"].includes(name) ? "num" : null, text: visible(name) })))), body);
  }

  async function ask(rows) {
    const query = rows === sqlMost && shownQuery !== null ? shownQuery : box.value;
    if (busy || !query.trim()) return;
    busy = true;
    params.set({ q: box.value });
    button.disabled = true;
    const begun = Date.now();
    const clock = setInterval(() => (state.textContent = "Running, " + Math.round((Date.now() - begun) / 1000) + " s; stopped after 30 s"), 1000);
    state.textContent = "Running…";
    try {
      const answer = await api.post("/api/sql", { query, rows });
      if (context.closed) return;
      shownQuery = query;
      recent.add(query);
      paintRecent();
      state.textContent = "";
      facts.textContent = plural(answer.rows.length, "row") + (answer.truncated ? " (truncated)" : "") + " · " + number(answer.milliseconds, 1) + " ms";
      save.hidden = !answer.rows.length;
      more.hidden = !(answer.truncated && rows < sqlMost);
      empty(result, answer.rows.length ? grid(answer) : emptyState("No rows", "The query returned no rows."));
      result.scrollTop = 0;
      context.announce(facts.textContent);
    } catch (error) {
      if (context.closed) return;
      state.textContent = "";
      facts.textContent = "";
      save.hidden = more.hidden = true;
      empty(result, el("pre", { class: "sql-error", role: "alert", text: visible(error.message) }));
    } finally {
      clearInterval(clock);
      busy = false;
      button.disabled = false;
    }
  }

  // The server writes it: a cell that a spreadsheet would take for a formula begins with an apostrophe there.
  async function csv() {
    save.disabled = true;
    try {
      const file = await api.file("/api/sql", { query: shownQuery, rows: sqlMost, format: "csv" });
      const url = URL.createObjectURL(file.blob);
      el("a", { href: url, download: file.name }).click();
      setTimeout(() => URL.revokeObjectURL(url), 60000);
      context.toast("saved " + file.name);
    } catch (error) {
      context.toast(error.message);
    } finally {
      save.disabled = false;
    }
  }

  const last = el("select", { class: "select sql-recent", aria: { label: "Recent queries" }, hidden: true, on: { change: () => {
    const chosen = recent.all()[Number(last.value)];
    last.value = "";
    if (chosen !== undefined) put(chosen);
  } } });
  function paintRecent() {
    const queries = recent.all();
    last.hidden = !queries.length;
    empty(last, el("option", { value: "", text: "Recent…" }), queries.map((query, i) => el("option", { value: String(i), text: visible(query.replace(/\s+/g, " ")).slice(0, 60) })));
  }
  paintRecent();
  empty(root, el("div", { class: "bar" }, el("h1", { text: "SQL" }), el("span", { class: "muted", text: "DuckDB on this book, read-only" })),
    el("div", { class: "sql-page" },
      el("section", { class: "panel panel-body sql-edit", aria: { label: "Query" } }, box, el("div", { class: "bar" }, button, last, state),
        el("div", { class: "bar sql-examples" }, el("h3", { text: "Examples" }), sqlExamples.map(([name, text]) => el("button", { class: "button small", type: "button", text: name, title: visible(text), on: { click: () => put(text) } })))),
      el("section", { class: "panel", aria: { label: "Tables" } }, el("div", { class: "panel-head" }, el("h2", { text: "Tables" }), el("span", { class: "muted", text: "click to list columns" })),
        el("dl", { class: "sql-tables" }, sqlTables.map(([name, words]) => [el("dt", null, el("button", { class: "sql-table", type: "button", text: name, title: "List the columns", on: { click: () => put("describe " + name) } })), el("dd", { text: words })])))),
    el("section", { class: "panel sql-panel", aria: { label: "Answer" } }, el("div", { class: "panel-head" }, el("h2", { text: "Rows" }), facts, el("span", { class: "spring" }), more, save), result));
  empty(result, emptyState(hasQuery ? "This query is from the URL and has not run" : "No query yet", hasQuery ? "Review it, then press Run or Control+Enter." : plural(run.records, "record") + ". Press Run or Control+Enter."));
  return { title: "SQL", crumbs: [{ text: "SQL" }], keys: [{ key: "i", label: "focus the query", run: () => box.focus() }], close: () => watch && watch.disconnect() };
}
