// The page of one trajectory: its text under a lens, what is known of each token, its record and its ledger.
// Invariant: the address holds lens, domain, mask, view, token, folds and zoom; opening it again shows the same.

import { el, empty, emptyState, count, number, icon, splitNumbers, visible } from "../dom.js";
import { lensBar, lensCodes, lensPeaks } from "../lenses.js";
import { TokenCurve, TokenStrip } from "../strip.js";
import { inspectorWords, tokenInspector } from "../inspector.js";
import { MASK_MODES, TokenPane, choiceBar, flagChips, sampleFlags, segmentVersions, showPicture } from "../tokens.js";

const TRAJECTORY_JSON_PAGE = 200;
const TRAJECTORY_JUDGE = /judge|critique|feedback|verif|grader|rubric|explan|rationale|test|stdout|stderr/i;
const TRAJECTORY_ADVICE = {
  ids: ["No tokenizer found, so token ids are shown.", "rollbook view PATH --tokenizer DIR", "shows them as text."],
  words: ["Only text was recorded, so it is split into words instead of tokens.", null, ""],
};

// A JSON value as a tree that opens where it is clicked; long lists come in pages.
export function jsonTree(value, name = null, open = true) {
  const key = name === null ? null : el("span", { class: "json-key", text: `${visible(String(name))}: ` });
  if (value === null || typeof value !== "object") {
    const kind = typeof value === "string" ? "json-text" : typeof value === "number" ? "json-number" : "json-muted";
    return el("div", { class: "json-line" }, key, el("span", { class: kind, text: typeof value === "string" ? `"${visible(value)}"` : String(value) }));
  }
  const list = Array.isArray(value);
  const entries = list ? value.map((item, i) => [i, item]) : Object.entries(value);
  if (entries.length === 0) return el("div", { class: "json-line" }, key, el("span", { class: "json-muted", text: list ? "[]" : "{}" }));
  const flat = list && entries.every(([, item]) => item === null || typeof item !== "object");
  const preview = flat ? ` ${visible(JSON.stringify(value.slice(0, 8))).slice(0, 100)}${value.length > 8 ? "…" : ""}` : "";
  const node = el("details", { class: "json-node" }, el("summary", null, key,
    el("span", { class: "json-muted", text: `${list ? `[${count(entries.length)}]` : `{${count(entries.length)}}`}${preview}` })));
  let shown = 0;
  const more = () => {
    const next = entries.slice(shown, shown + TRAJECTORY_JSON_PAGE);
    shown += next.length;
    node.append(...next.map(([childName, item]) => jsonTree(item, childName, false)));
    if (shown < entries.length) {
      const rest = el("button", { class: "button small", type: "button", text: `${count(entries.length - shown)} more`, on: { click: () => {
        rest.remove();
        more();
      } } });
      node.append(rest);
    }
  };
  node.addEventListener("toggle", () => {
    if (node.open && shown === 0) more();
  });
  if (open) node.open = true;
  return node;
}

function trajectoryTable(object) {
  const long = [];
  const rows = Object.entries(object).filter(([, value]) => {
    return value !== null && value !== undefined;
  }).map(([name, value]) => {
    if (typeof value === "string" && value.length > 160) {
      long.push(el("div", null, el("h3", { text: visible(name) }), el("div", { class: "tp-long", text: visible(value) })));
      return null;
    }
    const shown = typeof value === "object" ? jsonTree(value, null, false) : typeof value === "number" && !Number.isInteger(value) ? number(value) : visible(String(value));
    return el("tr", null, el("th", { scope: "row", text: visible(name) }), el("td", null, shown));
  });
  return [el("table", { class: "tp-kv" }, el("tbody", null, rows)), long];
}

// Parts of a reward as bars from a common zero.
export function rewardBars(parts, total) {
  const entries = [...parts, ...(total === null ? [] : [["total", total]])].filter(([, value]) => Number.isFinite(value));
  const low = Math.min(0, ...entries.map(([, value]) => value));
  const high = Math.max(0, ...entries.map(([, value]) => value));
  const span = high - low || 1;
  return el("div", { class: "tp-bars" }, entries.map(([name, value]) => {
    const fill = el("span", { class: value < 0 ? "tp-fill tp-minus" : "tp-fill" });
    fill.style.setProperty("left", `${(100 * (Math.min(0, value) - low)) / span}%`);
    fill.style.setProperty("width", `${(100 * Math.abs(value)) / span}%`);
    return el("div", { class: "tp-part" }, el("span", { text: visible(name), title: visible(name) }), el("span", { class: "tp-track" }, fill), el("span", { text: number(value) }));
  }));
}

function trajectoryDetails(run, trajectory, row) {
  const { parts, metrics } = splitNumbers(run, trajectory.parts);
  const sections = [];
  const add = (title, open, ...children) => sections.push(el("details", { class: "tp-detail", open }, el("summary", { text: title }), el("div", null, children)));
  const info = { ...(trajectory.info ?? {}) };
  const judged = {};
  for (const name of Object.keys(info)) {
    if (TRAJECTORY_JUDGE.test(name)) {
      judged[name] = info[name];
      delete info[name];
    }
  }
  if (trajectory.reward !== null || parts.length > 0 || Object.keys(judged).length > 0) {
    add("Reward", true, rewardBars(parts, trajectory.reward), Object.keys(judged).length > 0 ? trajectoryTable(judged) : null);
  }
  const answer = {};
  if (trajectory.label !== null && trajectory.label !== undefined) answer.label = trajectory.label;
  if (trajectory.reference !== null && trajectory.reference !== undefined) answer.reference = trajectory.reference;
  if (Object.keys(answer).length > 0) add("Answer", true, trajectoryTable(answer));
  const about = {
    status: trajectory.status, "finish reason": trajectory.finish_reason, kind: trajectory.kind, step: trajectory.step, task: trajectory.task,
    parent: trajectory.parent, "kept because": trajectory.kept, "group of": trajectory.group_size, "prompt tokens": trajectory.prompt_tokens,
    "trained tokens": row?.trained_tokens, state: row?.state === "" ? null : row?.state, "trained at step": row?.trained_step, staleness: row?.staleness,
    repetition: row?.repetition, images: trajectory.pictures?.length || null,
  };
  add("About", false, trajectoryTable(about));
  if (Object.keys(info).length > 0) add("Info", false, trajectoryTable(info));
  const logged = { ...(trajectory.metrics ?? {}), ...Object.fromEntries(metrics) };
  for (const [name] of parts) delete logged[name];
  if (Object.keys(logged).length > 0) add("Metrics", false, trajectoryTable(logged));
  if (trajectory.sampling && Object.keys(trajectory.sampling).length > 0) add("Sampling", false, trajectoryTable(trajectory.sampling));
  if (trajectory.tools?.length > 0) add(`Tools (${trajectory.tools.length})`, false, el("div", { class: "json" }, jsonTree(trajectory.tools)));
  return sections;
}

function trajectoryTime(seconds) {
  if (!Number.isFinite(seconds)) return "";
  return new Date(seconds * 1000).toISOString().replace("T", " ").replace(/(\.\d{2})\d*Z$/, "$1 UTC");
}

const TRAJECTORY_LEDGER = { dropped: "ledger-dropped", trained: "ledger-trained", acknowledged: "ledger-trained", acked: "ledger-trained" };

function trajectoryLedger(entries) {
  if (entries.length === 0) return emptyState("The ledger has no entries for this sample.");
  return el("div", { class: "ledger" }, entries.map((entry) => {
    const facts = [];
    for (const name of ["reason", "consumer", "step", "lease"]) {
      if (entry[name] !== null && entry[name] !== undefined && entry[name] !== "") facts.push(`${name} ${visible(String(entry[name]))}`);
    }
    if (typeof entry.detail === "string") facts.push(visible(entry.detail));
    else for (const [name, value] of Object.entries(entry.detail ?? {})) if (value !== null) facts.push(visible(`${name} ${typeof value === "object" ? JSON.stringify(value) : value}`));
    return el("div", { class: `ledger-line ${TRAJECTORY_LEDGER[entry.kind] ?? ""}` },
      el("span", { class: "muted", text: trajectoryTime(entry.time) }), el("span", { class: "ledger-dot" }),
      el("span", { class: "ledger-kind", text: visible(entry.kind ?? "") }), el("span", { text: facts.join(" · ") }));
  }));
}

// The note of a sample, which --annotate keeps beside the run.
function trajectoryNote(context, uid) {
  const text = el("textarea", { class: "input wide tp-note", rows: "3", maxlength: "10000", placeholder: "Add a note…", "aria-label": "note" });
  text.value = context.notes.get(uid);
  const state = el("span", { class: "muted", role: "status" });
  const save = el("button", { class: "button small", type: "button", text: "Save", disabled: true, on: { click: write } });
  async function write() {
    save.disabled = true;
    try {
      await context.notes.set(uid, text.value);
      state.textContent = "saved";
    } catch (error) {
      state.textContent = visible(error.message);
      save.disabled = false;
    }
  }
  text.addEventListener("input", () => {
    save.disabled = text.value === context.notes.get(uid);
    state.textContent = "";
  });
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) write();
  });
  const element = el("details", { class: "tp-detail", open: true }, el("summary", { text: "Note" }), el("div", null, text, el("div", { class: "tp-bar" }, save, state)));
  return { element, focus: () => text.focus() };
}

// Samples of the group, to choose one to compare with.
async function trajectoryDiffWith(context, trajectory) {
  let group;
  try {
    group = await context.api.json("/api/group", { gid: trajectory.gid });
  } catch (error) {
    context.toast(error.message);
    return;
  }
  const others = group.rows.filter((row) => row.uid !== trajectory.uid);
  if (others.length === 0) {
    context.toast("the group has no other sample");
    return;
  }
  const box = el("dialog", { class: "dialog", "aria-label": "compare with", on: { close: () => box.remove(), click: (event) => event.target === box && box.close() } },
    el("div", { class: "dialog-body" }, el("div", { class: "dialog-head" }, el("h2", { text: "Compare with" }), el("button", { class: "button", type: "button", text: "Close", on: { click: () => box.close() } })),
      el("div", { class: "ti-list" }, others.map((row) => el("button", {
        class: "ti-item", type: "button",
        on: { click: () => {
          box.close();
          context.go(context.link("group", trajectory.gid, { diff: `${trajectory.uid},${row.uid}` }));
        } },
      }, el("span", { text: `#${row.run}` }), el("span", { class: "ti-item-text", text: visible(row.closing ?? "") }), el("span", { text: `r ${number(row.reward)}` }))))));
  document.body.append(box);
  box.showModal();
}

export async function openTrajectory(context) {
  const { root, params, run, api } = context;
  const uid = context.path[1] ?? "";
  const [[trajectory], around] = await Promise.all([
    api.frame([uid]),
    api.json("/api/neighbors", { uid }).catch((error) => {
      if (error.status === 404 && api.isStatic) return null;
      throw error;
    }),
  ]);
  const row = around?.row ?? null;
  root.classList.add("tk-page");
  const words = params.get("q", "");
  let view = params.get("view", "chat");
  let mask = MASK_MODES.includes(params.get("mask", "dim")) ? params.get("mask", "dim") : "dim";
  const shown = trajectory.rejected ? [trajectory, trajectory.rejected] : [trajectory];
  let active = trajectory.rejected && params.get("side", "") === "rejected" ? 1 : 0;

  // ---- head
  const starred = el("button", { class: "icon-button", type: "button", title: "Star (*)", "aria-label": "star", on: { click: star } }, icon("star"));
  const walk = (label, before, after, name) => el("span", { class: "tp-walk" },
    before ? el("a", { class: "icon-button small", href: context.link("t", before, viewParams()), title: `previous ${name}`, "aria-label": `previous ${name}` }, icon("left")) : el("button", { class: "icon-button small", type: "button", disabled: true, "aria-label": `no previous ${name}` }, icon("left")),
    label,
    after ? el("a", { class: "icon-button small", href: context.link("t", after, viewParams()), title: `next ${name}`, "aria-label": `next ${name}` }, icon("right")) : el("button", { class: "icon-button small", type: "button", disabled: true, "aria-label": `no next ${name}` }, icon("right")));
  const { parts } = splitNumbers(run, trajectory.parts);
  const versions = segmentVersions(trajectory, 0, trajectory.ends.length);
  const head = el("div", { class: "tp-head" },
    el("h1", { class: "tp-id", text: visible(trajectory.uid), title: visible(trajectory.uid) }),
    starred,
    around === null ? null : walk("sample", around.previous, around.next, "sample"),
    around === null ? null : walk("group", around.previous_group, around.next_group, "group"),
    el("span", { class: "tp-fact" }, "reward ", el("b", { text: number(trajectory.reward) }),
      parts.length > 0 ? el("span", { class: "tp-parts", text: ` (${parts.slice(0, 4).map(([name, value]) => `${visible(name)} ${number(value)}`).join(" · ")}${parts.length > 4 ? " …" : ""})` }) : null),
    trajectory.advantage === null ? null : el("span", { class: "tp-fact" }, "advantage ", el("b", { text: number(trajectory.advantage) })),
    el("span", { class: "tp-fact" }, el("b", { text: count(trajectory.ends.length - trajectory.prompt_tokens) }), ` tokens `, el("span", { class: "muted", text: `+ ${count(trajectory.prompt_tokens)} prompt` })),
    versions === "" ? null : el("span", { class: "tp-fact", text: `policy ${versions}`, title: versions.includes("→") ? "the policy changed during sampling" : "" }),
    flagChips(sampleFlags(row, trajectory)),
    trajectory.kept ? el("span", { class: "chip", text: `kept: ${visible(trajectory.kept)}` }) : null,
    el("span", { class: "spring" }),
    el("span", { class: "tp-acts" },
      el("button", { class: "button small", type: "button", title: "Compare with another sample of the group (d)", text: "Compare…", on: { click: () => trajectoryDiffWith(context, trajectory) } }),
      run.features?.export && !api.isStatic ? el("button", { class: "button small", type: "button", title: "Export as one HTML file (e)", on: { click: exportHtml } }, icon("download"), "HTML") : null));
  paintStar();

  // ---- notices
  const notes = [];
  const advice = TRAJECTORY_ADVICE[trajectory.tokenized];
  if (advice !== undefined) notes.push(el("p", null, advice[0], advice[1] === null ? null : [" ", el("code", { text: advice[1] }), " "], advice[2]));
  for (const note of trajectory.notes ?? []) notes.push(el("p", { text: visible(note) }));
  // The first says most; the others wait, so that the text begins where it always does.
  const notices = notes.length === 0 ? null : el("div", { class: "tp-notice", role: "note" }, notes[0],
    notes.length === 1 ? null : el("details", null, el("summary", { text: `${notes.length - 1} more` }), notes.slice(1)));

  // ---- lens, mask, view
  const bar = lensBar({ run, trajectories: shown, params, onChange: recolor });
  const views = choiceBar("view", [["chat", "Chat", "turns, thinking and tools"], ["raw", "Raw tokens", "the exact tokens the trainer used"], ["json", "JSON", "the full record (J)"],
    ...(run.features?.ledger && !api.isStatic ? [["ledger", "Ledger", "ledger entries of this sample"]] : [])], view, setView);
  const masks = choiceBar("masked tokens", MASK_MODES.map((mode) => [mode, mode, `masked tokens: ${mode} (m)`]), mask, setMask);
  const maskBar = el("span", { class: "tp-label" }, "masked tokens", masks.element);
  const toolbar = el("div", { class: "tp-bar tp-tools" }, views.element, el("span", { class: "spring" }), maskBar);

  // ---- panes
  const folds = new Set(params.get("fold", "").split(",").filter((x) => x !== "").map(Number));
  const sidebar = el("div");
  const sides = shown.map((sideTrajectory, index) => {
    const pane = new TokenPane({
      trajectory: sideTrajectory, raw: view === "raw", lens: bar.lens(), scale: bar.scale(), mask, folds: index === 0 ? folds : [], width: 960,
      label: index === 0 ? "tokens of the sample" : "tokens of the rejected answer", mediaUrl: (sha) => api.mediaUrl(sha),
      onPicture: (picture, name) => showPicture(api.mediaUrl(picture.sha256), name),
      onCursor: (token) => moveTo(token, index, false),
      onScroll: () => index === active && strip.view(pane.topToken(), pane.bottomToken()),
      onFold: (now) => index === 0 && params.set({ fold: [...now].sort((a, b) => a - b).join(",") || null }),
    });
    const inspector = tokenInspector({ trajectory: sideTrajectory, run, onJump: (token) => moveTo(token, index, "center") });
    return { trajectory: sideTrajectory, pane, inspector };
  });
  const zoom = /^(\d+)-(\d+)$/.exec(params.get("zoom", ""));
  const curve = new TokenCurve({
    trajectory, range: zoom === null || Number(zoom[2]) <= Number(zoom[1]) ? null : [Number(zoom[1]), Math.min(Number(zoom[2]), trajectory.ends.length)],
    onSeek: (token) => moveTo(token, 0, "center"), onRange: (range) => params.set({ zoom: range === null ? null : range.join("-") }),
  });
  const strip = new TokenStrip({
    trajectory, from: 0, length: Math.max(1, trajectory.ends.length), label: "where in the sample",
    onSeek: (token) => sides[0].pane.reveal(token, "center"),
  });
  const measured = bar.keys.length > 1; // beside "off" there is a lens
  const strips = el("div", { class: "tp-strips" }, measured ? curve.element : null, strip.element);
  const stage = el("div", { class: "tp-view" });
  const note = run.features?.annotate && !api.isStatic ? trajectoryNote(context, uid) : null;
  const aside = el("div", { class: "tp-aside" }, sidebar, note === null ? null : note.element, trajectoryDetails(run, trajectory, row));
  const main = el("div", { class: "tp-main" }, el("div", { class: "tp-left" }, toolbar, stage), aside);
  empty(root, el("div", { class: "tk-top" }, head, notices, bar.element, strips), main);

  function viewParams() {
    const all = params.all();
    return { lens: all.lens, lo: all.lo, hi: all.hi, mask: all.mask, view: all.view };
  }

  function recolor(lens, scale) {
    for (const side of sides) side.pane.setLens(lens, scale);
    strip.draw(lens, scale);
    curve.draw(lens, scale);
    announceToken();
    if (lens !== null && lens.id !== "version") for (const side of sides) side.inspector.order(lens);
  }

  function announceToken() {
    const side = sides[active];
    if (side.pane.cursor >= 0) context.announce(inspectorWords(side.trajectory, side.pane.cursor, bar.lens()));
  }

  function moveTo(token, index, scroll) {
    if (view !== "chat" && view !== "raw") setView("chat");
    if (index !== active) {
      sides[active].pane.setCursor(null);
      active = index;
      empty(sidebar, sides[active].inspector.element);
    }
    const side = sides[active];
    const target = Math.max(0, Math.min(side.trajectory.ends.length - 1, token));
    side.pane.setCursor(target, scroll === undefined ? "near" : scroll);
    side.inspector.show(target);
    if (active === 0) {
      strip.mark(target);
      curve.mark(target);
    }
    params.set({ at: String(target), side: active === 1 ? "rejected" : null });
    announceToken();
  }

  function step(by) {
    const side = sides[active];
    const now = side.pane.cursor;
    moveTo(now < 0 ? (by > 0 ? Math.floor(side.pane.topToken()) : Math.floor(side.pane.bottomToken())) : now + by, active);
  }

  function peak(by) {
    const side = sides[active];
    const lens = bar.lens();
    const codes = lens === null ? null : lensCodes(side.trajectory, lens, bar.scale());
    if (codes === null) {
      context.toast("select a lens first (1 to 9)");
      return;
    }
    const peaks = lensPeaks(codes, bar.scale(), 0, codes.length);
    const now = side.pane.cursor;
    const next = by > 0 ? peaks.find((token) => token > now) : peaks.filter((token) => token < (now < 0 ? Infinity : now)).pop();
    if (next === undefined) context.toast(by > 0 ? "no later peak" : "no earlier peak");
    else moveTo(next, active, "center");
  }

  function turn(by) {
    const side = sides[active];
    const starts = [];
    let last = "";
    for (const segment of side.trajectory.segments) {
      const key = `${segment.role} ${segment.role === "assistant" ? segment.turn : ""}`;
      if (key !== last) starts.push(segment.start);
      last = key;
    }
    const now = side.pane.cursor >= 0 ? side.pane.cursor : Math.floor(side.pane.topToken());
    const next = by > 0 ? starts.find((start) => start > now) : starts.filter((start) => start < now).pop();
    if (next !== undefined) moveTo(next, active, "top");
  }

  function setMask(mode) {
    mask = mode;
    masks.set(mode);
    for (const side of sides) side.pane.setMask(mode);
    params.set({ mask: mode === "dim" ? null : mode });
    context.announce(`masked tokens: ${mode}`);
  }

  function setView(next) {
    view = next;
    views.set(next);
    params.set({ view: next === "chat" ? null : next });
    context.announce(`view: ${next}`);
    draw();
  }

  function draw() {
    const tokens = view === "chat" || view === "raw";
    strips.hidden = !tokens;
    bar.element.hidden = !tokens;
    maskBar.hidden = !tokens;
    main.classList.toggle("tp-alone", !tokens);
    aside.hidden = !tokens;
    if (tokens) {
      if (sides.length === 1) empty(stage, sides[0].pane.element);
      else {
        empty(stage, el("div", { class: "tp-pair" }, sides.map((side, index) => el("div", { class: "tp-side" },
          el("div", { class: "tp-side-head", text: index === 0 ? `Chosen · ${count(side.trajectory.ends.length - side.trajectory.prompt_tokens)} tokens` : `Rejected · ${count(side.trajectory.ends.length - side.trajectory.prompt_tokens)} tokens` }), side.pane.element))));
      }
      for (const side of sides) side.pane.setRaw(view === "raw");
      strip.paint();
      curve.paint();
      return;
    }
    empty(stage, el("div", { class: "tp-scroll muted", text: "…" }));
    const loadedView = view;
    const load = view === "json"
      ? api.json("/api/record", { uid }).then((record) => el("div", { class: "json", tabindex: "0" }, jsonTree(record)))
      : api.json("/api/history", { uid }).then((history) => trajectoryLedger(history.entries ?? []));
    load.then((node) => view === loadedView && empty(stage, node), (error) => view === loadedView && empty(stage, emptyState(visible(error.message))));
  }

  function star() {
    const on = context.stars.toggle(uid, uid);
    paintStar();
    context.announce(on ? "starred" : "not starred");
  }

  function paintStar() {
    const on = context.stars.has(uid);
    starred.classList.toggle("starred", on);
    starred.setAttribute("aria-pressed", String(on));
  }

  function exportHtml() {
    context.exportHtml({ uids: [uid] }, "this sample");
  }

  async function copyId() {
    try {
      await navigator.clipboard.writeText(uid);
      context.toast("id copied");
    } catch {
      context.toast(uid);
    }
  }

  const go = (target) => {
    if (!target) return false;
    context.go(context.link("t", target, viewParams()));
    return true;
  };

  draw();
  empty(sidebar, sides[active].inspector.element);
  strip.draw(bar.lens(), bar.scale());
  curve.draw(bar.lens(), bar.scale());
  if (words !== "") {
    const hits = sides[0].pane.find(words);
    if (hits.length > 0 && params.get("at", null) === null) sides[0].pane.reveal(hits[0], "center");
  }
  const at = params.get("at", null);
  if (at !== null && /^\d+$/.test(at) && (view === "chat" || view === "raw")) moveTo(Number(at), active, "center");
  else if (words === "" && trajectory.prompt_tokens > 400) sides[0].pane.reveal(Math.min(trajectory.prompt_tokens, trajectory.ends.length - 1), "top");
  strip.view(sides[0].pane.topToken(), sides[0].pane.bottomToken());

  const searchState = { at: -1 };
  const crumbs = [];
  if (trajectory.step !== null && !api.isStatic) crumbs.push({ text: `step ${trajectory.step}`, href: context.link("step", trajectory.step) });
  crumbs.push({ text: `group ${trajectory.task || trajectory.gid}`, href: context.link("group", trajectory.gid, { lens: params.get("lens", null) }) });
  crumbs.push({ text: `sample #${trajectory.run}` });
  return {
    title: `sample ${visible(uid)}`,
    crumbs,
    keys: [
      { key: ["l", "ArrowRight"], label: "next token", run: () => step(1) },
      { key: ["h", "ArrowLeft"], label: "previous token", run: () => step(-1) },
      { key: "]", label: "next peak", run: () => peak(1) },
      { key: "[", label: "previous peak", run: () => peak(-1) },
      { key: "}", label: "next turn", run: () => turn(1) },
      { key: "{", label: "previous turn", run: () => turn(-1) },
      ...bar.keys,
      { key: "m", label: "mask: dim, hatch, off", run: () => setMask(MASK_MODES[(MASK_MODES.indexOf(mask) + 1) % MASK_MODES.length]) },
      { key: "r", label: "raw tokens or chat", run: () => setView(view === "raw" ? "chat" : "raw") },
      { key: "J", label: "record as JSON", run: () => setView(view === "json" ? "chat" : "json") },
      { key: "j", label: "next sample of the group", run: () => go(around?.next) },
      { key: "k", label: "previous sample of the group", run: () => go(around?.previous) },
      { key: ">", label: "next group", run: () => go(around?.next_group) },
      { key: "<", label: "previous group", run: () => go(around?.previous_group) },
      { key: "d", label: "compare with another sample", run: () => { trajectoryDiffWith(context, trajectory); } },
      { key: "p", label: api.isStatic ? "" : "this prompt over training", run: () => (api.isStatic ? false : context.go(context.link("prompt", trajectory.prompt))) },
      { key: "n", label: words === "" ? "" : "next match", run: () => {
        const hits = sides[0].pane.find(words);
        if (hits.length === 0) return false;
        searchState.at = (searchState.at + 1) % hits.length;
        moveTo(hits[searchState.at], 0, "center");
        return true;
      } },
      { key: "y", label: "copy the id", run: () => { copyId(); } },
      { key: "*", label: "star", run: star },
      { key: "w", label: note === null ? "" : "write a note", run: () => (note === null ? false : note.focus()) },
      { key: ["e", "H"], label: api.isStatic ? "" : "export as HTML", run: () => (api.isStatic ? false : exportHtml()) },
    ],
    close() {
      for (const side of sides) side.pane.close();
      strip.close();
      curve.close();
    },
  };
}
