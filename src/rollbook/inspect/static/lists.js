// lists.js: the list of samples or groups that the step page and the samples page share.
// Invariant: filter, view, sort, the current row, the two selected ones and the peek are in the address.

import { compact, count, el, empty, emptyState, icon, number, plural, splitNumbers, visible } from "./dom.js";
import { filterBox } from "./filter.js";
import { dataTable, pagedRows, tableFoot } from "./table.js";

// Most severe first: a row shows only a few.
const listFlags = {
  nan: ["bad", "NaN/Inf", "NaN or infinite values"],
  mismatch: ["bad", "mismatch", "train-inference mismatch: log-probs of trainer and engine differ"],
  loop: ["bad", "loop", "a response repeats itself"],
  truncated: ["warn", "truncated", "a response was truncated at its limit"],
  "zero-variance": ["warn", "zero var.", "all samples have the same reward: no learning signal"],
  duplicates: ["warn", "duplicates", "long responses of the group are identical"],
  incomplete: ["warn", "incomplete", "fewer samples than the group size"],
  stale: ["warn", "stale", "sampled from a policy more than one version old"],
  "all-solved": ["good", "all solved", "every sample is near the run's top reward"],
  "some-solved": ["good", "some solved", "some samples are near the run's top reward"],
  "none-solved": ["", "none solved", "no sample is near the run's top reward"],
};
const listCells = 16; // maximum number of cells that fit
const listQuick = [
  ["truncated", "truncated"],
  ["loops", "loop"],
  ["NaN/Inf", "nan"],
  ["stale", "stale"],
  ["zero variance", "zero_variance"],
];

/** The reward scale of the run: [low, high]. */
export function rewardScale(run) {
  const range = run.rewards;
  if (range && range[0] !== null && range[1] !== null && range[1] > range[0]) return range;
  return [Math.min(0, range ? range[0] || 0 : 0), Math.max(1, range ? range[1] || 0 : 0)];
}

/** Rewards as small cells, best first, filled by the reward on the run's scale, with a text label. If there are too
    many, an evenly spaced selection that includes the best and the worst is shown. */
export function rewardCells(rewards, scale) {
  const [low, high] = scale;
  const every = (rewards.length - 1) / (listCells - 1);
  const shown = rewards.length <= listCells ? rewards : Array.from({ length: listCells }, (_, i) => rewards[Math.round(i * every)]);
  const cells = shown.map((reward) => {
    if (reward === null) return el("span", { class: "cell none" });
    const share = Math.min(1, Math.max(0, (reward - low) / (high - low || 1)));
    return el("span", { class: "cell r" + Math.min(4, Math.floor(share * 5)) }, el("i", { style: { "--fill": share === 0 ? "0%" : Math.max(12, Math.round(share * 100)) + "%" } }));
  });
  const which = rewards.length > shown.length ? "rewards, best first (" + listCells + " of " + count(rewards.length) + " evenly spaced): " : "rewards, best first: ";
  const words = which + shown.map((r) => number(r, 2)).join(" ");
  return el("span", { class: "cells", role: "img", aria: { label: words }, title: words }, cells);
}

/** Flags as chips, by their fixed names. */
export function groupFlags(flags) {
  return listChips(Object.keys(listFlags).filter((flag) => flags.includes(flag)).map((flag) => {
    const [tone, text, help] = listFlags[flag];
    return el("span", { class: tone ? "chip " + tone : "chip", title: help, text });
  }));
}

// Three chips fit a row; the rest is shown as a number.
function listChips(chips) {
  if (chips.length <= 3) return el("span", { class: "flags" }, chips);
  const rest = chips.slice(2).map((chip) => chip.textContent).join(", ");
  return el("span", { class: "flags" }, chips.slice(0, 2), el("span", { class: "chip", title: rest, text: "+" + (chips.length - 2), aria: { label: "and " + rest } }));
}

function listSampleFlags(row, note = "") {
  const chips = [];
  const add = (tone, text, help) => chips.push(el("span", { class: tone ? "chip " + tone : "chip", title: visible(help), text: visible(text) }));
  if (row.status !== "finished" && row.status) add(row.status === "truncated" ? "warn" : row.status === "unfinished" ? "" : "bad", row.status, "how generation ended");
  if (row.loop_at !== null && row.loop_at !== undefined) add("bad", "loop@" + count(row.loop_at), "repetition loop starts at this token");
  if (row.nans) add("bad", "NaN/Inf", plural(row.nans, "NaN/Inf value"));
  if (row.scored === 2) add("bad", "NaN reward", "the reward is NaN or infinite");
  if (row.duplicate) add("warn", "duplicate", "identical to another sample of the group");
  if (row.staleness > 1) add("warn", "stale " + row.staleness, "policy versions between sampling and training");
  if (row.state === "dropped") add("warn", "dropped", row.reason ? "dropped: " + row.reason : "dropped");
  if (row.images) add("", plural(row.images, "image"), "the prompt has images");
  if (row.tool_calls) add("", plural(row.tool_calls, "tool call"), "");
  if (row.kept) add("", row.kept, "why the saver selected it");
  if (row.removed_reason) add("", "removed", row.removed_reason);
  if (note) add("", "note", note);
  return listChips(chips);
}

/** Display name of a group. */
export function groupName(row) {
  return visible(row.task || row.gid);
}

/** Display name of a sample: its task and its number in the group. */
export function rowName(row) {
  return visible(row.task || row.gid) + " #" + row.run + (row.turn ? "." + row.turn : "");
}

/**
 * The list with its controls. options: {step (or null: all steps), views: ["groups", "samples"], label, columnsFor}.
 * Returns {root, keys, ready (promise of the first rows), live(), setFilter(text), close()}.
 */
export function recordList(context, options) {
  const { params, run, api, link } = context;
  const fixedStep = options.step !== undefined && options.step !== null;
  const view = () => (options.views.includes(params.get("view")) ? params.get("view") : options.views[0]);
  const isGroups = () => view() === "groups";
  const keyOf = (row) => (isGroups() ? row.gid : row.uid);
  const hrefOf = (row) => (isGroups() ? link("group", row.gid) : link("t", row.uid));
  const scale = rewardScale(run);
  let milliseconds = null;
  let fresh = 0;

  // ---- columns

  const star = {
    id: "star", label: "", width: "34px",
    cell: (row) => {
      const on = context.stars.has(keyOf(row));
      return on ? el("span", { class: "starred", role: "img", aria: { label: "starred" } }, icon("star")) : "";
    },
  };
  const where = { id: "step", label: "Step", width: "62px", num: true, sort: "step", first: "-", cell: (row) => (api.isStatic ? String(row.step) : el("a", { class: "row-link", href: link("step", row.step), text: String(row.step), tabindex: "-1" })) };
  const link1 = (row, text) => el("a", { class: "row-link", href: hrefOf(row), text, tabindex: "-1" });
  const opening = (row) => el("span", { class: "prompt-cell", title: visible(row.opening || "") }, row.images ? icon("image") : null, visible(row.opening || ""));
  const groupColumns = () => [
    star,
    fixedStep ? null : where,
    { id: "gid", label: "Group", width: "108px", cell: (row) => link1(row, groupName(row)) },
    { id: "opening", label: "Prompt", width: "auto", cell: opening },
    { id: "n", label: "n", help: "samples", drop: 2, width: "56px", num: true, sort: "n", first: "-", cell: (row) => count(row.n) + (row.expected && row.expected > row.n ? "/" + row.expected : "") },
    { id: "rewards", label: "Rewards", help: "reward of each sample, best first, on the run's scale " + number(scale[0], 2) + " to " + number(scale[1], 2), width: "186px", cell: (row) => rewardCells(row.rewards, scale) },
    { id: "mean", label: "Mean ± sd", help: "mean and standard deviation of the reward", drop: 2, width: "118px", num: true, sort: "mean", first: "-", cell: (row) => (row.mean === null ? "–" : number(row.mean, 2) + " ± " + number(row.std, 2)) },
    { id: "length", label: "Length", help: "mean response tokens", drop: 2, width: "72px", num: true, sort: "length", first: "-", cell: (row) => compact(row.length) },
    { id: "entropy", label: "Entropy", help: "mean entropy of trained tokens", drop: 1, width: "74px", num: true, sort: "entropy", first: "-", cell: (row) => number(row.entropy, 3) },
    { id: "kl_max", label: "Max KL", help: "largest per-token KL to the reference", drop: 1, width: "74px", num: true, sort: "kl_max", first: "-", cell: (row) => number(row.kl_max, 3) },
    { id: "flags", label: "Flags", width: "230px", cell: (row) => groupFlags(row.flags || []) },
  ].filter(Boolean);
  const sampleColumns = () => [
    star,
    fixedStep ? null : where,
    { id: "uid", label: "Sample", width: "132px", cell: (row) => el("a", { class: "row-link name-cell", href: hrefOf(row), tabindex: "-1" }, el("span", { text: groupName(row) }), el("span", { text: "#" + row.run + (row.turn ? "." + row.turn : "") })) },
    { id: "reward", label: "Reward", width: "78px", num: true, sort: "reward", first: "-", cell: (row) => (row.scored === 2 ? "NaN" : number(row.reward, 3)) },
    { id: "advantage", label: "Advantage", help: "mean over trained tokens", drop: 1, width: "94px", num: true, sort: "advantage", first: "-", cell: (row) => number(row.advantage, 2) },
    { id: "closing", label: "End of response", width: "auto", cell: (row) => el("div", { class: "end-cell", title: visible(row.closing || "") }, el("span", { text: visible(row.closing || "") })) },
    { id: "response_tokens", label: "Length", help: "response tokens", width: "72px", num: true, sort: "response_tokens", first: "-", cell: (row) => count(row.response_tokens) },
    { id: "entropy", label: "Entropy", help: "mean entropy of trained tokens", drop: 2, width: "74px", num: true, sort: "entropy", first: "-", cell: (row) => number(row.entropy, 3) },
    { id: "kl_max", label: "Max KL", help: "largest per-token KL to the reference", drop: 2, width: "74px", num: true, sort: "kl_max", first: "-", cell: (row) => number(row.kl_max, 3) },
    { id: "mismatch_max", label: "Max mismatch", help: "largest per-token train-inference mismatch, |old_logprobs - logprobs|", drop: 1, width: "74px", num: true, sort: "mismatch_max", first: "-", cell: (row) => number(row.mismatch_max, 3) },
    { id: "flags", label: "Flags", width: "230px", cell: (row) => listSampleFlags(row, context.notes.get(row.uid)) },
  ].filter(Boolean);

  // ---- the parts

  const filter = filterBox({ columns: run.columns || [], value: params.get("filter", ""), onApply: (text) => {
    params.set({ filter: text, at: null });
    paintQuick();
    reload();
  } });
  const buttons = options.views.map((name) => el("button", { type: "button", text: name === "groups" ? "Groups" : "Samples", aria: { pressed: "false" }, on: { click: () => setView(name) } }));
  const switcher = options.views.length > 1 ? el("div", { class: "segmented", role: "group", aria: { label: "View" } }, buttons) : null;
  const quick = listQuick.map(([text, expression]) => ({ expression, node: el("button", { class: "chip", type: "button", text, title: "Filter: " + expression, on: { click: () => toggleQuick(expression) } }) }));
  const chosen = el("span", { class: "selection", role: "status" });
  const news = el("button", { class: "button small", type: "button", hidden: true, on: { click: () => reload(true) } });
  const message = el("div", { hidden: true });
  const holder = el("div");
  const facts = el("span", { role: "status" });
  const exporter = el("button", { class: "button small", type: "button", on: { click: exportList } }, icon("download"), "Export HTML");
  const canExport = !api.isStatic && run.features && run.features.export;
  const root = el("section", { class: "panel", aria: { label: options.label } },
    el("div", { class: "panel-head" }, switcher, api.isStatic ? null : filter.root, el("span", { class: "quick", role: "group", hidden: api.isStatic, aria: { label: "Quick filters" } }, quick.map((q) => q.node)), el("span", { class: "spring" }), chosen, news),
    holder, message,
    tableFoot([facts], [el("span", { class: "muted" }, el("kbd", { text: "j" }), " ", el("kbd", { text: "k" }), " move · ", el("kbd", { text: "⏎" }), " open · ", el("kbd", { text: "space" }), " peek · ", api.isStatic ? null : [el("kbd", { text: "x" }), " select two · "], el("kbd", { text: "*" }), " star"), canExport ? exporter : null]));

  let source = null;
  let table = null;
  let peek = null;
  let peeks = 0; // rises with every row peeked at: an answer that comes late knows that it is late
  let ready = null;

  function paintQuick() {
    const now = params.get("filter", "");
    for (const item of quick) item.node.setAttribute("aria-pressed", String(now.split(/\s+and\s+/).includes(item.expression)));
  }
  function toggleQuick(expression) {
    const parts = params.get("filter", "").split(/\s+and\s+/).filter(Boolean);
    const at = parts.indexOf(expression);
    if (at >= 0) parts.splice(at, 1);
    else parts.push(expression);
    setFilter(parts.join(" and "));
  }
  function setFilter(text) {
    filter.set(text);
    params.set({ filter: text, at: null });
    paintQuick();
    reload();
  }
  function setView(name) {
    if (name === view()) return;
    params.set({ view: name === options.views[0] ? null : name, sort: null, at: null, x: null, y: null });
    build();
    reload();
  }
  function paintFacts() {
    const total = source.total();
    const totalText = isGroups() ? plural(total, "group") : plural(total, "sample");
    const parts = [totalText];
    if (milliseconds !== null) parts.push("query " + number(milliseconds, 1) + " ms");
    if (context.stars.count()) parts.push(plural(context.stars.count(), "star"));
    facts.textContent = parts.join(" · ");
  }
  function fetchPage(offset, limit, snapshot) {
    return api.json("/api/list", {
      view: view(), step: fixedStep ? options.step : null, filter: params.get("filter", ""), sort: params.get("sort", ""), offset, limit, snapshot,
      evaluation: params.get("evaluation") === "1" ? 1 : null,
    });
  }
  function build() {
    if (table) table.destroy();
    source = pagedRows(keyOf, fetchPage, (answer) => {
      milliseconds = answer.milliseconds;
      filter.error(null);
      paintFacts();
      show();
      table.refresh();
    }, (error) => {
      filter.error(error.message);
    });
    table = dataTable({
      label: options.label, columns: isGroups() ? groupColumns() : sampleColumns(), source, key: keyOf,
      onOpen: (row, event) => {
        if (event && (event.ctrlKey || event.metaKey)) window.open(hrefOf(row), "_blank", "noopener");
        else context.go(hrefOf(row));
      },
      onMove: (row) => {
        params.set({ at: keyOf(row) });
        if (peek) paintPeek(row);
      },
      selected: (row) => [params.get("x"), params.get("y")].includes(keyOf(row)),
      sort: params.get("sort", ""), onSort: (sort) => {
        params.set({ sort, at: null });
        reload();
      },
      bottom: () => (peek ? peek.getBoundingClientRect().height + 16 : 0),
    });
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(options.views[i] === view())));
    empty(holder, table.root);
    paintSelection();
  }
  function show() {
    const none = source.total() === 0;
    holder.hidden = none;
    message.hidden = !none;
    if (!none) return;
    const filtered = params.get("filter", "");
    empty(message, filtered
      ? emptyState("No matches", el("p", null, el("button", { class: "button small", type: "button", text: "Clear filter", on: { click: () => setFilter("") } })))
      : emptyState("No " + view() + " yet", api.isStatic ? "This file contains none." : "They appear here automatically."));
  }
  function reload(keep) {
    fresh = 0;
    news.hidden = true;
    if (!keep) table.clear();
    ready = source.restart();
    return ready;
  }

  // ---- selecting two

  function paintSelection() {
    const ids = [params.get("x"), params.get("y")].filter(Boolean);
    const noun = isGroups() ? "group" : "sample";
    if (!ids.length) empty(chosen);
    else if (ids.length === 1) empty(chosen, el("span", { class: "muted", text: "1 " + noun + " selected; press x on another to compare" }), clearButton());
    else empty(chosen, el("span", { class: "muted", text: "2 " + noun + "s selected" }), el("button", { class: "button small primary", type: "button", on: { click: compare } }, "Compare"), clearButton());
  }
  function clearButton() {
    return el("button", { class: "icon-button small", type: "button", aria: { label: "Clear selection" }, on: { click: () => {
      params.set({ x: null, y: null });
      paintSelection();
      table.refresh();
    } } }, icon("close"));
  }
  function select() {
    const row = table.current();
    if (!row) return false;
    const id = keyOf(row);
    const [x, y] = [params.get("x"), params.get("y")];
    if (x === id) params.set({ x: y, y: null });
    else if (y === id) params.set({ y: null });
    else if (!x) params.set({ x: id });
    else params.set({ y: id });
    paintSelection();
    table.refresh();
    const now = [params.get("x"), params.get("y")].filter(Boolean).length;
    context.announce(now + " selected" + (now === 2 ? "; press d to compare" : ""));
    return true;
  }
  function compare() {
    const [x, y] = [params.get("x"), params.get("y")];
    if (!x || !y) return false;
    compareRows(x, y).catch((error) => context.toast(error.message));
    return true;
  }
  async function compareRows(x, y) {
    const pairFilter = (isGroups() ? "gid" : "uid") + " in (" + JSON.stringify(x) + ", " + JSON.stringify(y) + ")";
    const { rows } = await api.json("/api/list", { view: view(), filter: pairFilter, limit: 2 });
    const first = rows.find((row) => keyOf(row) === x);
    const other = rows.find((row) => keyOf(row) === y);
    if (!first || !other) throw new Error("one of the two samples no longer exists");
    if (!isGroups() && first.gid === other.gid) context.go(link("group", first.gid, { diff: x + "," + y }));
    else if (first.prompt && first.prompt === other.prompt && first.step !== other.step) {
      const [early, late] = first.step < other.step ? [first, other] : [other, first];
      context.go(link("prompt", first.prompt, { a: early.step, b: late.step, ua: isGroups() ? null : early.uid, ub: isGroups() ? null : late.uid }));
    } else context.go(link("samples", { filter: pairFilter, sort: "-reward" })); // different prompts: side by side in one list
  }

  // ---- star, peek, export

  function toggleStar() {
    const row = table.current();
    if (!row) return false;
    const on = context.stars.toggle(keyOf(row), isGroups() ? null : row.uid);
    context.announce(on ? "starred" : "unstarred");
    // The row is drawn anew: its star is a part of it.
    source.replace(keyOf(row), { ...row });
    table.refresh();
    paintFacts();
    return true;
  }
  function dropPeek() {
    if (peek) peek.remove();
    peek = null;
    context.root.style.removeProperty("padding-bottom");
  }
  function closePeek() {
    if (!peek) return false;
    dropPeek();
    params.set({ peek: null });
    return true;
  }
  function togglePeek() {
    if (closePeek()) return true;
    const row = table.current();
    if (!row) {
      if (!table.goTo(0)) return false;
      return togglePeek();
    }
    params.set({ peek: "1" });
    peek = el("aside", { class: "peek", aria: { label: "Preview" } });
    root.append(peek);
    context.root.style.setProperty("padding-bottom", "48vh"); // the last row too can be above the peek
    paintPeek(row);
    return true;
  }
  function peekHead(title, row, href) {
    return el("div", { class: "peek-head" }, el("h2", { text: title }), row, el("span", { class: "spring" }),
      el("a", { class: "button small", href, text: "Open" }),
      el("button", { class: "icon-button small", type: "button", aria: { label: "Close preview" }, on: { click: closePeek } }, icon("close")));
  }
  function sampleFacts(row) {
    const parts = splitNumbers(run, row.parts).parts.slice(0, 6).map(([name, value]) => visible(name) + " " + number(value));
    return el("span", { class: "muted" }, "reward ", el("b", { text: row.scored === 2 ? "NaN" : number(row.reward) }), parts.length ? " (" + parts.join(" · ") + ")" : "", " · " + count(row.response_tokens) + " tokens", " ", listSampleFlags(row));
  }
  async function paintPeek(row) {
    const mine = (peeks += 1);
    await fillPeek(row, mine);
    if (mine === peeks && peek) table.reveal();
  }
  async function fillPeek(row, mine) {
    const prompt = el("p", { class: "peek-text prompt", text: visible(row.opening || "") });
    if (!isGroups()) {
      const end = el("p", { class: "peek-text", text: "…" + visible(row.closing || "") });
      empty(peek, peekHead(rowName(row), sampleFacts(row), hrefOf(row)), el("div", { class: "peek-body" }, el("h3", { text: "Prompt" }), prompt, el("h3", { text: "End of response" }), end));
      context.announce("preview: " + rowName(row) + ", reward " + number(row.reward));
      try {
        const [trajectory] = await api.frame([row.uid]);
        if (mine !== peeks || !peek) return;
        const start = trajectory.prompt_tokens > 0 ? trajectory.ends[trajectory.prompt_tokens - 1] : 0;
        const response = trajectory.text.slice(start);
        end.textContent = (response.length > 1600 ? "… " : "") + visible(response.slice(-1600));
      } catch {
        // the row's own words have to do
      }
      return;
    }
    const body = el("div", { class: "peek-body" }, el("h3", { text: "Prompt" }), prompt);
    empty(peek, peekHead("Group " + groupName(row), [rewardCells(row.rewards, scale), groupFlags(row.flags || [])], hrefOf(row)), body);
    context.announce("preview: group " + groupName(row));
    try {
      const group = await api.json("/api/group", { gid: row.gid });
      if (mine !== peeks || !peek) return;
      const best = group.rows[0];
      const worst = group.rows[group.rows.length - 1];
      for (const [name, sample] of group.rows.length > 1 ? [["Best", best], ["Worst", worst]] : [["Only sample", best]]) {
        if (sample) body.append(el("div", { class: "bar" }, el("h3", { text: name }), sampleFacts(sample)), el("p", { class: "peek-text", text: "…" + visible(sample.closing || "") }));
      }
    } catch {
      // the group's row has to do
    }
  }
  function exportList() {
    const row = table.current();
    const step = fixedStep ? "step = " + options.step : "";
    const typed = params.get("filter", "");
    const both = [step, typed ? (step ? "(" + typed + ")" : typed) : ""].filter(Boolean).join(" and ");
    const ids = [params.get("x"), params.get("y")].filter(Boolean);
    if (!isGroups() && ids.length) context.exportHtml({ uids: ids }, plural(ids.length, "selected sample"));
    else if (isGroups() && row && params.get("at")) context.exportHtml({ gid: row.gid }, "group " + groupName(row) + " (" + plural(row.n, "sample") + ")");
    else context.exportHtml({ filter: both }, plural(source.total(), isGroups() ? "group" : "sample") + " of this list, the limit of one file");
    return true;
  }

  build();
  paintQuick();
  ready = source.restart().then(() => {
    if (context.closed) return;
    const at = params.get("at");
    if (at && source.find(at) >= 0) {
      const opensPeek = params.get("peek") === "1";
      table.focusKey(at);
      if (opensPeek && table.current()) togglePeek();
    }
  });

  return {
    root,
    keys: [
      { key: ["j", "ArrowDown"], label: "next row", run: (event) => (event.key === "ArrowDown" && !holder.contains(document.activeElement) ? false : table.move(1)) },
      { key: ["k", "ArrowUp"], label: "previous row", run: (event) => (event.key === "ArrowUp" && !holder.contains(document.activeElement) ? false : table.move(-1)) },
      { key: "Enter", label: "open the row", run: (event) => table.open(event) },
      { key: " ", label: "preview", run: togglePeek },
      { key: "Escape", label: "", run: closePeek },
      api.isStatic ? null : { key: "x", label: "select two to compare", run: select },
      api.isStatic ? null : { key: "d", label: "compare the selected two", run: compare },
      { key: "*", label: "star", run: toggleStar },
      api.isStatic ? null : { key: ":", label: "filter", run: () => {
        filter.input.focus();
        filter.input.select();
      } },
      options.views.length > 1 ? { key: "v", label: "switch groups/samples", run: () => setView(isGroups() ? "samples" : "groups") } : null,
      canExport ? { key: "e", label: "export as HTML", run: exportList } : null,
    ].filter(Boolean),
    ready: () => ready,
    /** `n` more samples came: the list stays as it is until the reader asks. */
    grew(n) {
      fresh += n;
      if (fresh <= 0) return;
      news.hidden = false;
      news.textContent = "Show " + plural(fresh, "new sample");
    },
    setFilter,
    /** Shows groups or samples; what is asked for next fills it. */
    show(name) {
      params.set({ view: name === options.views[0] ? null : name, sort: null, at: null, x: null, y: null });
      build();
    },
    close() {
      dropPeek();
      table.destroy();
    },
  };
}
