// The page of a group: the samples of one prompt side by side, where they part, and how each was rewarded.
// Invariant: the address holds lens, domain, mask, sort, columns, samples shown, sync, map, diff and cursor.

import { el, empty, emptyState, count, number, icon, plural, splitNumbers, visible } from "../dom.js";
import { diffView } from "../diff.js";
import { lensBar, lensCodes, lensPeaks, lensPercentile, lensValues } from "../lenses.js";
import { TokenStrip } from "../strip.js";
import { inspectorWords } from "../inspector.js";
import { MASK_MODES, TokenPane, choiceBar, firstDivergence, flagChips, sampleFlags, questionText, sampleName, showPicture, tokenShown } from "../tokens.js";
import { MASK_BIT } from "../frame.js";
import { forkTreeView } from "../tree.js";

const GROUP_COLUMNS = 4;
const GROUP_MOST_COLUMNS = 16;
const GROUP_MOST_SAMPLES = 128; // read at once; a larger group shows its first by reward
const GROUP_SYNC = ["off", "token", "percent", "turn"];
const GROUP_SORTS = [
  ["extremes", "best and worst"], ["best", "best first"], ["worst", "worst first"], ["longest", "longest first"], ["shortest", "shortest first"],
  ["entropy", "highest entropy"], ["kl", "highest KL"], ["mismatch", "largest train-inference mismatch"], ["run", "as sampled"],
];

function groupKey(value) {
  return Number.isFinite(value) ? value : -Infinity;
}

function groupSorted(samples, by) {
  const order = {
    best: (s) => groupKey(s.row.reward), worst: (s) => (Number.isFinite(s.row.reward) ? -s.row.reward : -Infinity), longest: (s) => s.row.response_tokens,
    shortest: (s) => -s.row.response_tokens, entropy: (s) => groupKey(s.row.entropy), kl: (s) => groupKey(s.row.kl_max), mismatch: (s) => groupKey(s.row.mismatch_max),
    run: (s) => -s.row.run,
  }[by === "extremes" ? "best" : by];
  return order === undefined ? samples : [...samples].sort((a, b) => order(b) - order(a));
}

// The samples that columns show when nobody chose: of "best and worst" half from either end.
function groupDefault(sorted, by, columns) {
  if (by !== "extremes" || sorted.length <= columns) return sorted.slice(0, columns);
  const head = Math.ceil(columns / 2);
  return [...sorted.slice(0, head), ...sorted.slice(sorted.length - (columns - head))];
}

// The turns of a response: [[start, stop], ...], each from where the assistant begins to where the next turn does.
function groupTurns(trajectory) {
  const starts = [];
  let turn = null;
  for (const segment of trajectory.segments) {
    if (segment.stop <= trajectory.prompt_tokens || segment.role !== "assistant") continue;
    if (segment.turn !== turn) starts.push(Math.max(segment.start, trajectory.prompt_tokens));
    turn = segment.turn;
  }
  if (starts.length === 0) starts.push(trajectory.prompt_tokens);
  return starts.map((start, i) => [start, starts[i + 1] ?? trajectory.ends.length]);
}

function groupChips(group, rows) {
  const chips = [];
  const rewards = rows.map((row) => row.reward).filter((reward) => Number.isFinite(reward));
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / (rewards.length || 1);
  const spread = Math.sqrt(rewards.reduce((sum, reward) => sum + (reward - mean) ** 2, 0) / (rewards.length || 1));
  if (rewards.length > 1 && spread < 1e-9) chips.push(["zero variance", "warn", "all samples have the same reward, so group-relative advantages are 0"]);
  const cut = rows.filter((row) => row.status === "truncated").length;
  if (cut > 0) chips.push([`${count(cut)} truncated`, "warn", "truncated responses"]);
  const loops = rows.filter((row) => row.loop_at !== null && row.loop_at !== undefined).length;
  if (loops > 0) chips.push([plural(loops, "loop"), "warn", "responses that end in a repetition loop"]);
  const twice = rows.filter((row) => row.duplicate).length;
  if (twice > 0) chips.push([plural(twice, "duplicate"), "warn", "long responses identical to another sample"]);
  const size = Math.max(0, ...rows.map((row) => row.group_size ?? 0));
  if (size > rows.length) chips.push([`${count(rows.length)} of ${count(size)} here`, "warn", "incomplete group"]);
  if (group.evaluation) chips.push(["evaluation", "", "not trained on"]);
  return { chips, mean: rewards.length > 0 ? mean : null, spread };
}

export async function openGroup(context) {
  const { root, params, run, api } = context;
  const gid = context.path[1] ?? "";
  const group = await api.json("/api/group", { gid });
  const present = group.rows.filter((row) => !row.removed_reason);
  const read = present.slice(0, GROUP_MOST_SAMPLES);
  const trajectories = read.length === 0 ? [] : await api.frame(read.map((row) => row.uid));
  const several = new Set(read.map((row) => row.run)).size < read.length;
  const samples = [];
  read.forEach((row, i) => {
    const name = sampleName(row, several);
    const trajectory = trajectories[i];
    if (trajectory.rejected) {
      samples.push({ key: row.uid, row, trajectory, name: `${name} chosen` });
      samples.push({ key: `${row.uid} rejected`, row: { ...row, reward: null, response_tokens: trajectory.rejected.ends.length - trajectory.rejected.prompt_tokens }, trajectory: trajectory.rejected, name: `${name} rejected`, rejected: true });
    } else samples.push({ key: row.uid, row, trajectory, name });
  });
  const byKey = new Map(samples.map((sample) => [sample.key, sample]));
  const best = groupSorted(samples, "best")[0];
  for (const sample of samples) {
    sample.turns = groupTurns(sample.trajectory);
    const against = sample === best ? samples.find((other) => other !== best) : best;
    const place = against === undefined ? -1 : firstDivergence(sample.trajectory, against.trajectory);
    sample.fork = place < 0 ? -1 : sample.trajectory.prompt_tokens + place;
  }
  root.classList.add("tk-page");

  let mask = MASK_MODES.includes(params.get("mask", "dim")) ? params.get("mask", "dim") : "dim";
  let sort = GROUP_SORTS.some(([id]) => id === params.get("sort", "")) ? params.get("sort", "") : "extremes";
  let columns = Math.max(1, Math.min(GROUP_MOST_COLUMNS, Number(params.get("cols", GROUP_COLUMNS)) || GROUP_COLUMNS));
  let sync = GROUP_SYNC.includes(params.get("sync", "")) ? params.get("sync", "") : "token";
  let map = ["strips", "tree", "off"].includes(params.get("map", "")) ? params.get("map", "") : "strips";
  let chosen = groupList(params.get("show", "")).filter((key) => byKey.has(key));
  let diff = groupList(params.get("diff", "")).filter((key) => byKey.has(key)).slice(0, 2);
  let by = params.get("by", "word") === "token" ? "token" : "word";
  const shown = new Map(); // key -> {sample, pane, element}, in the order of the columns
  let active = null; // key
  let leader = null; // the pane that the reader scrolls

  function groupList(text) {
    return text.split(",").filter((part) => part !== "").map((part) => {
      try {
        return decodeURIComponent(part);
      } catch {
        return part;
      }
    });
  }
  const joined = (keys) => keys.map((key) => encodeURIComponent(key)).join(",") || null;

  // ---- head
  const facts = groupChips(group, group.rows);
  const walk = (target, name, way) => target
    ? el("a", { class: "icon-button small", href: context.link("group", target, { lens: params.get("lens", null), cols: params.get("cols", null), sync: params.get("sync", null), map: params.get("map", null) }), title: `${name} group of the step (${way === "left" ? "K" : "J"})`, "aria-label": `${name} group` }, icon(way))
    : el("button", { class: "icon-button small", type: "button", disabled: true, "aria-label": `no ${name} group` }, icon(way));
  const head = el("div", { class: "tp-head" },
    el("h1", { class: "tp-id", text: `Group ${visible(group.gid)}`, title: visible(group.gid) }),
    group.task === null || group.task === "" ? null : el("span", { class: "tp-fact muted", text: `task ${visible(String(group.task))}` }),
    el("span", { class: "tp-walk" }, walk(group.previous, "previous", "left"), "group", walk(group.next, "next", "right")),
    el("span", { class: "tp-fact" }, el("b", { text: count(group.rows.length) }), group.rows.length === 1 ? " sample" : " samples"),
    facts.mean === null ? null : el("span", { class: "tp-fact" }, "reward ", el("b", { text: number(facts.mean) }), el("span", { class: "muted", text: ` ± ${number(facts.spread)}` })),
    flagChips(facts.chips),
    group.timeline?.length > 1 ? el("span", { class: "gp-times" }, el("span", { class: "muted", text: "this prompt at step" }),
      group.timeline.slice(-14).map((entry) => el("a", {
        class: "gp-time", href: context.link("group", entry.gid, { lens: params.get("lens", null) }), "aria-current": String(entry.gid === group.gid),
        title: `step ${entry.step}: ${plural(entry.n, "sample")}, mean reward ${number(entry.mean)}`, text: `${entry.step}`,
      })),
      api.isStatic ? null : el("a", { href: context.link("prompt", group.prompt), text: "timeline" })) : null,
    el("span", { class: "spring" }),
    run.features?.export && !api.isStatic ? el("button", { class: "button small", type: "button", title: "Export the group as one HTML file (e)", on: { click: exportHtml } }, icon("download"), "HTML") : null);

  const notices = [];
  if (present.length < group.rows.length) notices.push(`The bytes of ${plural(group.rows.length - present.length, "sample")} were removed; their ledger entries are in the step's list.`);
  if (read.length < present.length) notices.push(`Of ${count(present.length)} samples, the ${count(read.length)} with the best rewards are loaded.`);
  if (trajectories.some((trajectory) => trajectory.tokenized === "ids")) notices.push("No tokenizer found, so token ids are shown. Start the viewer with --tokenizer DIR to see text.");
  if (trajectories.length > 0 && trajectories.every((trajectory) => trajectory.tokenized === "words")) notices.push("Only text was recorded, so it is split into words instead of tokens.");

  // ---- prompt
  const first = trajectories[0];
  let promptPane = null;
  const answer = group.label ?? group.reference ?? null;
  const thumbs = (first?.pictures ?? []).slice(0, 4).map((picture, i) => {
    const url = api.mediaUrl(picture.sha256);
    return url === "" ? null : el("img", { src: url, alt: `image ${i + 1}`, height: "22", loading: "lazy", class: picture.height < 22 ? "pixelated" : null });
  });
  const prompt = el("details", { class: "gp-prompt", on: { toggle: () => {
    params.set({ prompt: prompt.open ? "open" : null });
    if (prompt.open && promptPane === null && first !== undefined) {
      promptPane = new TokenPane({
        trajectory: first, to: first.prompt_tokens, mask: "off", label: "prompt", width: 1360, mediaUrl: (sha) => api.mediaUrl(sha),
        onPicture: (picture, name) => showPicture(api.mediaUrl(picture.sha256), name),
      });
      prompt.append(promptPane.element);
    }
  } } }, el("summary", null,
    el("span", { class: "muted", text: "Prompt" }), thumbs,
    el("span", { class: "gp-opening", text: visible((first === undefined ? "" : questionText(first)) || (group.opening ?? "")) }),
    first === undefined ? null : el("span", { class: "muted", text: plural(first.prompt_tokens, "token") }),
    answer === null ? null : el("span", { class: "gp-answer", title: "reference answer" }, "answer ", el("b", { text: visible(typeof answer === "object" ? JSON.stringify(answer) : String(answer)) }))));

  if (samples.length === 0) {
    empty(root, el("div", { class: "tk-top" }, head, prompt), emptyState("No sample of this group is available.", "Their data was removed or is not loaded yet."));
    return { title: `group ${visible(gid)}`, crumbs: groupCrumbs() };
  }

  // ---- controls
  const bar = lensBar({ run, trajectories: samples.map((sample) => sample.trajectory), params, onChange: recolor });
  const masks = choiceBar("masked tokens", MASK_MODES.map((mode) => [mode, mode, `masked tokens: ${mode} (m)`]), mask, setMask);
  const syncs = choiceBar("scroll together", GROUP_SYNC.map((mode) => [mode, mode, `scroll together by ${mode} (s)`]), sync, setSync);
  const sorts = el("select", { class: "select", "aria-label": "sort samples", on: { change: (event) => setSort(event.target.value) } },
    GROUP_SORTS.map(([id, label]) => el("option", { value: id, text: label, selected: id === sort })));
  const counts = el("select", { class: "select", "aria-label": "columns", on: { change: (event) => setColumns(Number(event.target.value)) } },
    [...new Set([1, 2, 3, 4, 5, 6, Math.min(GROUP_MOST_COLUMNS, samples.length), columns])].sort((a, b) => a - b).map((n) => el("option", { value: String(n), text: String(n), selected: n === columns })));
  const maps = choiceBar("map", [["strips", "Strips", "one row per sample"], ["tree", "Fork tree", "where samples diverge"], ["off", "Hide", "hide the map"]], map, setMap);
  const differ = el("button", { class: "button small", type: "button", title: "Diff two samples (d)", text: "Diff", on: { click: toggleDiff } });
  const controls = el("div", { class: "tp-bar" }, bar.element, el("span", { class: "spring" }), el("span", { class: "tp-label" }, "mask", masks.element));
  const strips = el("div", { class: samples.length > 5 ? "gp-strips gp-two" : "gp-strips" });
  const tree = el("div", { class: "gp-tree" });
  const panel = el("section", { class: "gp-map", "aria-label": "map of the group" },
    el("div", { class: "gp-map-head" }, maps.element,
      el("span", { class: "tp-label" }, "order", sorts), el("span", { class: "tp-label" }, "columns", counts), el("span", { class: "spring" }),
      el("span", { class: "tp-label" }, "scroll together", syncs.element), differ),
    strips, tree);
  const readout = el("div", { class: "gp-token" });
  const stage = el("div", { class: "gp-columns" });
  const diffBox = el("div", { class: "gp-diff", hidden: true });
  empty(root, el("div", { class: "tk-top" }, head, notices.map((note) => el("div", { class: "tp-notice", role: "note" }, el("span", { text: note }))), prompt, controls, panel), readout, stage, diffBox);
  if (params.get("prompt", "") === "open") prompt.open = true;

  // ---- strips: all samples on one scale of positions
  const longest = Math.max(1, ...samples.map((sample) => sample.trajectory.ends.length - sample.trajectory.prompt_tokens));
  for (const sample of samples) {
    const { row, trajectory } = sample;
    const flags = sampleFlags(row, trajectory);
    sample.strip = new TokenStrip({
      trajectory, from: trajectory.prompt_tokens, length: longest, fork: sample.fork, label: `where in sample ${sample.name}`,
      onSeek: (token) => seek(sample, token),
    });
    const tone = Number.isFinite(row.reward) && facts.mean !== null && facts.spread > 1e-9 ? (row.reward > facts.mean ? "gp-reward good" : "gp-reward bad") : "gp-reward";
    sample.button = el("button", {
      class: "gp-name", type: "button", "aria-pressed": "false", title: "show or hide column", on: { click: () => toggle(sample) },
    }, el("span", { class: "gp-on" }), el("span", { text: sample.name.split(" ")[0] }), el("span", { class: tone, text: `r ${number(row.reward)}` }),
    el("span", { class: "muted", text: `${count(row.response_tokens)}t` }), el("span", { class: "gp-flag", text: sample.rejected ? "rejected" : flags.map(([text]) => text).join(" · "), title: flags.map(([text]) => text).join(" · ") }));
    sample.line = el("div", { class: "gp-strip" }, sample.button, sample.strip.element);
  }

  function groupCrumbs() {
    const list = [];
    if (group.step !== null && !api.isStatic) list.push({ text: `step ${group.step}`, href: context.link("step", group.step) });
    list.push({ text: `group ${group.task || group.gid}` });
    return list;
  }

  // ---- columns
  function keysShown() {
    if (chosen.length > 0) return chosen.slice(0, GROUP_MOST_COLUMNS);
    return groupDefault(groupSorted(samples, sort), sort, columns).map((sample) => sample.key);
  }

  function column(sample) {
    const { trajectory, row } = sample;
    const single = sample.turns.length === 1 && trajectory.segments.every((segment) => segment.role === "assistant" || segment.stop <= trajectory.prompt_tokens);
    const pane = new TokenPane({
      trajectory, from: trajectory.prompt_tokens, lens: bar.lens(), scale: bar.scale(), mask, quiet: single, label: `response of sample ${sample.name}`, width: Math.floor(1380 / Math.max(1, keysShown().length)),
      mediaUrl: (sha) => api.mediaUrl(sha), onPicture: (picture, name) => showPicture(api.mediaUrl(picture.sha256), name),
      onCursor: (token) => moveTo(sample, token, false), onHover: (token) => say(token === null ? activeSample() : sample, token === null ? cursor() : token, token !== null),
      onScroll: (scrolledPane) => {
        sample.strip.view(scrolledPane.topToken(), scrolledPane.bottomToken());
        if (scrolledPane === leader) follow(scrolledPane, sample);
      },
    });
    if (sample.fork >= 0) pane.setFork(sample.fork);
    const { parts } = splitNumbers(run, row.parts ?? trajectory.parts);
    const element = el("section", { class: "gp-column", "aria-label": `sample ${sample.name}` },
      el("header", { class: "gp-column-head" },
        el("h2", null, el("a", { href: context.link("t", row.uid, { lens: params.get("lens", null) }), text: sample.name, title: "open sample" })),
        sample.rejected ? null : el("span", null, "r ", el("b", { text: number(row.reward) })),
        row.advantage === null || row.advantage === undefined || sample.rejected ? null : el("span", { class: "muted", text: `A ${row.advantage > 0 ? "+" : ""}${number(row.advantage)}` }),
        el("span", { class: "muted", text: `${count(row.response_tokens)} tokens` }),
        flagChips(sampleFlags(sample.rejected ? null : row, trajectory)),
        el("span", { class: "gp-acts" },
          el("button", { class: "icon-button small", type: "button", title: "diff with another sample", "aria-label": `diff ${sample.name}`, text: "⇄", on: { click: () => diffWith(sample) } }),
          el("button", { class: "icon-button small", type: "button", title: "hide column", "aria-label": `hide ${sample.name}`, on: { click: () => toggle(sample) } }, icon("close")))),
      pane.element,
      parts.length > 0 && !sample.rejected ? el("footer", { class: "gp-column-foot" }, parts.map(([name, value]) => el("span", null, `${visible(name)} `, el("b", { text: number(value) })))) : null);
    const lead = () => {
      leader = pane;
      activate(sample);
    };
    for (const event of ["wheel", "pointerdown", "touchstart"]) element.addEventListener(event, () => (leader = pane), { passive: true });
    element.addEventListener("focusin", lead);
    return { sample, pane, element };
  }

  function layOut() {
    const visibleKeys = keysShown();
    const tops = new Map([...shown].map(([key, shownColumn]) => [key, shownColumn.pane.element.scrollTop]));
    for (const [key, shownColumn] of shown) {
      if (visibleKeys.includes(key)) continue;
      shownColumn.pane.close();
      shownColumn.element.remove();
      shownColumn.sample.strip.view(null);
      shownColumn.sample.strip.mark(null);
      shown.delete(key);
    }
    const before = new Map(shown);
    shown.clear();
    for (const key of visibleKeys) shown.set(key, before.get(key) ?? column(byKey.get(key)));
    const nodes = [...shown.values()].map((shownColumn) => shownColumn.element);
    // Moving a node forgets how far it was scrolled, so a node that stands right is not moved.
    nodes.forEach((node, i) => {
      if (stage.children[i] !== node) stage.insertBefore(node, stage.children[i] ?? null);
    });
    for (const [key, shownColumn] of shown) {
      if (tops.has(key)) shownColumn.pane.element.scrollTop = tops.get(key);
      shownColumn.pane.scrolled();
    }
    for (const sample of samples) sample.button.setAttribute("aria-pressed", String(shown.has(sample.key)));
    if (active === null || !shown.has(active)) activate(byKey.get(visibleKeys[0]));
    for (const sample of groupSorted(samples, sort)) strips.append(sample.line);
  }

  function activate(sample) {
    if (sample === undefined) return;
    active = sample.key;
    for (const [key, shownColumn] of shown) shownColumn.element.dataset.active = String(key === active);
  }

  function activeSample() {
    return byKey.get(active);
  }

  function cursor() {
    const shownColumn = shown.get(active);
    return shownColumn === undefined || shownColumn.pane.cursor < 0 ? null : shownColumn.pane.cursor;
  }

  function toggle(sample) {
    const now = keysShown();
    const next = now.includes(sample.key) ? now.filter((key) => key !== sample.key) : [...now, sample.key];
    if (next.length === 0) return;
    chosen = next.slice(-GROUP_MOST_COLUMNS);
    params.set({ show: joined(chosen) });
    layOut();
    if (shown.has(sample.key)) activate(sample);
  }

  function seek(sample, token) {
    if (diff.length === 2) closeDiff();
    if (!shown.has(sample.key)) toggle(sample);
    const shownColumn = shown.get(sample.key);
    leader = shownColumn.pane;
    activate(sample);
    shownColumn.pane.reveal(token, "center");
  }

  // ---- scrolling together
  function follow(pane, sample) {
    if (sync === "off") return;
    const moves = [];
    if (sync === "percent") {
      const share = pane.element.scrollTop / Math.max(1, pane.element.scrollHeight - pane.element.clientHeight);
      for (const shownColumn of shown.values()) {
        if (shownColumn.pane !== pane) moves.push([shownColumn.pane.element, share * (shownColumn.pane.element.scrollHeight - shownColumn.pane.element.clientHeight)]);
      }
    } else {
      const top = pane.element.scrollTop <= 0 ? 0 : pane.topToken() - sample.trajectory.prompt_tokens;
      let turn = 0;
      let share = 0;
      if (sync === "turn") {
        const place = top + sample.trajectory.prompt_tokens;
        while (turn + 1 < sample.turns.length && sample.turns[turn + 1][0] <= place) turn += 1;
        const [from, to] = sample.turns[turn];
        share = (place - from) / Math.max(1, to - from);
      }
      for (const shownColumn of shown.values()) {
        if (shownColumn.pane === pane) continue;
        let token = top + shownColumn.sample.trajectory.prompt_tokens;
        if (sync === "turn") {
          const [from, to] = shownColumn.sample.turns[Math.min(turn, shownColumn.sample.turns.length - 1)];
          token = from + Math.min(1, share) * (to - from);
        }
        moves.push([shownColumn.pane.element, pane.element.scrollTop <= 0 ? 0 : shownColumn.pane.heightOf(token)]);
      }
    }
    // All heights are read before anything moves.
    for (const [element, height] of moves) if (Math.abs(element.scrollTop - height) > 1) element.scrollTop = height;
  }

  // ---- cursor
  function say(sample, token, hovered) {
    if (sample === undefined || token === null) {
      empty(readout, el("span", null, "Click a token, or move with ", el("kbd", { text: "h" }), " ", el("kbd", { text: "l" }), " · ", el("kbd", { text: "]" }), " next peak · dashed box: first difference from the best sample"));
      return;
    }
    const { trajectory } = sample;
    const items = [el("b", { text: `${sample.name} token ${count(token - trajectory.prompt_tokens)}` }), el("code", { text: visible(tokenShown(trajectory, token)).replace(/\n/g, "⏎") })];
    for (const lens of run.lenses ?? []) {
      const values = lensValues(trajectory, lens);
      if (values === null || !Number.isFinite(values[token])) continue;
      const chosenLens = bar.lens() !== null && lens.id === bar.lens().id;
      const place = chosenLens ? lensPercentile(trajectory, lens, values[token]) : null;
      const shownValue = lens.id === "version" ? String(values[token]) : number(values[token]);
      items.push(el("span", null, `${lens.label} `, el("b", { text: shownValue }), place === null ? null : ` (pct ${Math.round(place.percent)})`));
    }
    if (!(trajectory.flags[token] & MASK_BIT)) items.push(el("span", { class: "tk-badge", text: "masked" }));
    if (hovered) readout.dataset.hover = "true";
    else delete readout.dataset.hover;
    empty(readout, items);
  }

  function moveTo(sample, token, scroll) {
    for (const shownColumn of shown.values()) {
      if (shownColumn.sample !== sample) {
        shownColumn.pane.setCursor(null);
        shownColumn.sample.strip.mark(null);
      }
    }
    activate(sample);
    const shownColumn = shown.get(sample.key);
    const target = Math.max(sample.trajectory.prompt_tokens, Math.min(sample.trajectory.ends.length - 1, token));
    leader = shownColumn.pane;
    shownColumn.pane.setCursor(target, scroll);
    sample.strip.mark(target);
    say(sample, target, false);
    params.set({ at: String(target), on: sample.key });
    context.announce(inspectorWords(sample.trajectory, target, bar.lens()));
  }

  function step(by) {
    const shownColumn = shown.get(active);
    if (shownColumn === undefined) return;
    moveTo(shownColumn.sample, shownColumn.pane.cursor < 0 ? Math.floor(shownColumn.pane.topToken()) : shownColumn.pane.cursor + by, "near");
  }

  function peak(by) {
    const shownColumn = shown.get(active);
    const codes = shownColumn === undefined || bar.lens() === null ? null : lensCodes(shownColumn.sample.trajectory, bar.lens(), bar.scale());
    if (codes === null) {
      context.toast("select a lens first (1 to 9)");
      return;
    }
    const peaks = lensPeaks(codes, bar.scale(), shownColumn.sample.trajectory.prompt_tokens, codes.length);
    const now = shownColumn.pane.cursor;
    const next = by > 0 ? peaks.find((token) => token > now) : peaks.filter((token) => token < (now < 0 ? Infinity : now)).pop();
    if (next === undefined) context.toast(by > 0 ? "no later peak" : "no earlier peak");
    else moveTo(shownColumn.sample, next, "center");
  }

  function turn(by) {
    const shownColumn = shown.get(active);
    if (shownColumn === undefined) return;
    const now = shownColumn.pane.cursor >= 0 ? shownColumn.pane.cursor : Math.floor(shownColumn.pane.topToken());
    const starts = shownColumn.sample.turns.map(([start]) => start);
    const next = by > 0 ? starts.find((start) => start > now) : starts.filter((start) => start < now).pop();
    if (next !== undefined) moveTo(shownColumn.sample, next, "top");
  }

  function across(by) {
    const keys = [...shown.keys()];
    const next = keys[Math.max(0, Math.min(keys.length - 1, keys.indexOf(active) + by))];
    shown.get(next).pane.element.focus({ preventScroll: true });
    shown.get(next).element.scrollIntoView({ inline: "nearest", block: "nearest" });
    activate(byKey.get(next));
    const row = byKey.get(next).row;
    context.announce(`sample ${byKey.get(next).name}, reward ${number(row.reward)}, ${plural(row.response_tokens, "token")}`);
  }

  // ---- settings
  function recolor(lens, scale) {
    for (const shownColumn of shown.values()) shownColumn.pane.setLens(lens, scale);
    for (const sample of samples) sample.strip.draw(lens, scale);
    say(activeSample(), cursor(), false);
  }

  function setMask(mode) {
    mask = mode;
    masks.set(mode);
    for (const shownColumn of shown.values()) shownColumn.pane.setMask(mode);
    params.set({ mask: mode === "dim" ? null : mode });
    context.announce(`masked tokens: ${mode}`);
  }

  function setSync(mode) {
    sync = mode;
    syncs.set(mode);
    params.set({ sync: mode === "token" ? null : mode });
    context.announce(`scroll together: ${mode}`);
    if (leader !== null) for (const shownColumn of shown.values()) if (shownColumn.pane === leader) follow(shownColumn.pane, shownColumn.sample);
  }

  function setSort(next) {
    sort = next;
    chosen = [];
    params.set({ sort: next === "extremes" ? null : next, show: null });
    layOut();
  }

  function setColumns(next) {
    columns = next;
    chosen = [];
    counts.value = String(next);
    params.set({ cols: next === GROUP_COLUMNS ? null : String(next), show: null });
    layOut();
  }

  let treeMade = false;
  function setMap(next) {
    map = next;
    maps.set(next);
    params.set({ map: next === "strips" ? null : next });
    strips.hidden = next !== "strips";
    tree.hidden = next !== "tree";
    if (next === "tree" && !treeMade) {
      treeMade = true;
      const drawTree = (most) => {
        const treeView = forkTreeView({
          trajectories: samples.map((sample) => sample.trajectory), rewards: samples.map((sample) => sample.row.reward), names: samples.map((sample) => sample.name), most,
          onFocus: (indices, position) => {
            chosen = indices.slice(0, 6).map((i) => samples[i].key);
            params.set({ show: joined(chosen) });
            if (diff.length === 2) closeDiff();
            layOut();
            for (const shownColumn of shown.values()) {
              const at = shownColumn.sample.trajectory.prompt_tokens + position;
              if (at < shownColumn.sample.trajectory.ends.length) shownColumn.pane.reveal(at, "center");
            }
            context.announce(`${plural(indices.length, "sample")} on this branch`);
          },
        });
        empty(tree, treeView.element, treeView.tree.cut === 0 ? null : el("p", { class: "gp-prompt-note muted" }, `${plural(treeView.tree.cut, "more fork")} `,
          el("button", { class: "button small", type: "button", text: "show all", on: { click: () => drawTree(Infinity) } })));
      };
      drawTree();
    }
    if (next === "strips") for (const sample of samples) sample.strip.paint();
  }

  // ---- diff
  function toggleDiff() {
    if (diff.length === 2) closeDiff();
    else {
      diffWith(byKey.get(active) ?? best);
    }
  }

  // The best sample against the worst; any other against the best.
  function diffWith(sample) {
    const other = sample === best ? groupSorted(samples, "worst").find((candidate) => candidate !== best) : best;
    if (other === undefined) context.toast("the group has only one sample");
    else openDiff(sample.key, other.key);
  }

  function openDiff(a, b) {
    diff = [a, b];
    params.set({ diff: joined(diff), by: by === "word" ? null : by });
    drawDiff();
  }

  function closeDiff() {
    diff = [];
    params.set({ diff: null, by: null });
    drawDiff();
  }

  function drawDiff() {
    const on = diff.length === 2;
    stage.hidden = on;
    readout.hidden = on;
    diffBox.hidden = !on;
    differ.setAttribute("aria-pressed", String(on));
    if (!on) {
      empty(diffBox);
      return;
    }
    const pick = (index) => el("select", { class: "select", "aria-label": index === 0 ? "left sample" : "right sample", on: { change: (event) => {
      const next = [...diff];
      next[index] = event.target.value;
      openDiff(...next);
    } } }, samples.map((sample) => el("option", { value: sample.key, text: `${sample.name} · r ${number(sample.row.reward)}`, selected: sample.key === diff[index] })));
    const ways = choiceBar("compare", [["word", "words"], ["token", "tokens"]], by, (next) => {
      by = next;
      openDiff(...diff);
    });
    const [left, right] = diff.map((key) => byKey.get(key));
    const label = (sample) => `${sample.name} · reward ${number(sample.row.reward)} · ${count(sample.row.response_tokens)} tokens`;
    empty(diffBox, el("div", { class: "tp-bar gp-prompt-note" }, pick(0), el("button", { class: "icon-button small", type: "button", title: "swap", "aria-label": "swap sides", text: "⇄", on: { click: () => openDiff(diff[1], diff[0]) } }), pick(1), ways.element,
      el("span", { class: "spring" }), el("button", { class: "button small", type: "button", text: "Close", title: "back to columns (d)", on: { click: closeDiff } })),
    diffView(left.trajectory, right.trajectory, { by, labels: [label(left), label(right)] }));
  }

  function exportHtml() {
    context.exportHtml({ gid }, `this group: ${plural(group.rows.length, "sample")}`);
  }

  for (const sample of samples) sample.strip.draw(bar.lens(), bar.scale());
  setMap(map);
  layOut();
  say(activeSample(), null, false);
  drawDiff();
  const at = params.get("at", null);
  const on = params.get("on", null);
  if (at !== null && /^\d+$/.test(at) && shown.has(on)) moveTo(byKey.get(on), Number(at), "center");

  const back = api.isStatic ? "" : "this prompt over training";
  return {
    title: `group ${visible(String(group.task || gid))}`,
    crumbs: groupCrumbs(),
    keys: [
      { key: ["j", "ArrowRight"], label: "next column", run: () => across(1) },
      { key: ["k", "ArrowLeft"], label: "previous column", run: () => across(-1) },
      { key: "Enter", label: "open the sample", run: () => context.go(context.link("t", byKey.get(active).row.uid, { lens: params.get("lens", null), at: cursor() })) },
      { key: "J", label: "next group", run: () => (group.next ? context.go(context.link("group", group.next, { lens: params.get("lens", null) })) : false) },
      { key: "K", label: "previous group", run: () => (group.previous ? context.go(context.link("group", group.previous, { lens: params.get("lens", null) })) : false) },
      { key: "l", label: "next token", run: () => step(1) },
      { key: "h", label: "previous token", run: () => step(-1) },
      { key: "]", label: "next peak", run: () => peak(1) },
      { key: "[", label: "previous peak", run: () => peak(-1) },
      { key: "}", label: "next turn", run: () => turn(1) },
      { key: "{", label: "previous turn", run: () => turn(-1) },
      ...bar.keys,
      { key: "m", label: "mask: dim, hatch, off", run: () => setMask(MASK_MODES[(MASK_MODES.indexOf(mask) + 1) % MASK_MODES.length]) },
      { key: "s", label: "scroll together: off, by token, percent, turn", run: () => setSync(GROUP_SYNC[(GROUP_SYNC.indexOf(sync) + 1) % GROUP_SYNC.length]) },
      { key: "d", label: "diff two samples", run: toggleDiff },
      { key: "f", label: "switch map: strips, fork tree, none", run: () => setMap({ strips: "tree", tree: "off", off: "strips" }[map]) },
      { key: "+", label: "add a column", run: () => setColumns(Math.min(GROUP_MOST_COLUMNS, samples.length, columns + 1)) },
      { key: "-", label: "remove a column", run: () => setColumns(Math.max(1, columns - 1)) },
      { key: "v", label: "show the prompt", run: () => (prompt.open = !prompt.open) || true },
      { key: "p", label: back, run: () => (api.isStatic ? false : context.go(context.link("prompt", group.prompt))) },
      { key: "Escape", label: "", run: () => {
        if (diff.length !== 2) return false;
        closeDiff();
        return true;
      } },
      { key: ["e", "H"], label: api.isStatic ? "" : "export as HTML", run: () => (api.isStatic ? false : exportHtml()) },
    ],
    close() {
      for (const shownColumn of shown.values()) shownColumn.pane.close();
      for (const sample of samples) sample.strip.close();
      if (promptPane !== null) promptPane.close();
    },
  };
}
