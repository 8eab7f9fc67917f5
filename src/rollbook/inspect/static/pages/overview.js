// overview.js: the overview of a run: curves, health, findings, steps.
// Invariant: updates of a live run are added to the page; nothing is requested twice.

import { compact, count, debounce, el, empty, emptyState, explain, icon, number, percent, plural, stepShare, visible } from "../dom.js";
import { chartGroup, sparkline, stepChart } from "../charts.js";
import { dataTable, heldRows, tableFoot } from "../table.js";

const overviewCards = [
  { id: "reward", title: "Reward", help: "Reward per sample: mean, median and quantiles of the step", advice: "Records have no reward yet.", zero: false },
  { id: "length", title: "Response length", help: "Response length in tokens", advice: "No samples yet.", zero: true, format: compact },
  { id: "entropy", title: "Entropy", help: "Entropy of the policy, mean over a sample's trained tokens", advice: "Record “entropy” per response token to track exploration.", zero: true },
  { id: "kl", title: "KL", help: "KL to the reference policy (k3 estimate), mean over a sample's trained tokens", advice: "Record “ref_logprobs” to track KL to the reference.", zero: true },
  { id: "mismatch", title: "Train-inference mismatch", help: "Mean |old_logprobs - logprobs|: difference between the trainer's and the engine's log-probs of the sampled tokens", advice: "Record “logprobs” and “old_logprobs” to track the train-inference mismatch.", zero: true },
  { id: "staleness", title: "Staleness", format: compact, help: "Policy versions between sampling and training", advice: "Record “policy_versions” to track staleness.", zero: true },
];

const overviewHealth = [
  ["zero_variance", "Zero-variance groups", "Groups whose samples all have the same reward and give no learning signal. Share of the step's groups.", 0.5, 0.8],
  ["solved", "Groups solved", "Groups with at least one sample near the run's top reward, and groups where all samples are. Shares of the step's groups.", null, null],
  ["truncated", "Truncated", "Samples truncated at their length limit.", 0.1, 0.3],
  ["loops", "Loops", "Samples that are at least half repetition.", 0.02, 0.1],
  ["duplicates", "Duplicates", "Responses of at least 16 tokens that are identical to an earlier one of their group.", 0.1, 0.3],
  ["stale", "Stale > 1", "Samples from a policy more than one version older than the trained one.", 0.2, 0.5],
  ["masked", "Masked tokens", "Response tokens that are not trained on, such as tool results.", null, null],
  ["incomplete", "Incomplete groups", "Groups with fewer samples than their group size. Share of the step's groups.", 0.02, 0.2],
  ["errors", "Errors", "Samples that ended with an error.", 0.01, 0.1],
  ["nans", "NaN/Inf", "Samples with NaN or infinite rewards or per-token values.", 1e-9, 0.01],
];
const overviewShares = ["zero_variance", "solved", "truncated", "loops", "duplicates", "stale"];
const overviewShareNames = ["zero variance", "solved", "truncated", "loops", "duplicates", "stale"];

/** Opens the overview. */
export async function openOverview(context) {
  const { root, params, run, api, link } = context;
  const evaluation = () => (params.get("evaluation") === "1" ? 1 : 0);
  // The doctor takes seconds on a large run, so findings are shown when they arrive.
  const loadFindings = () => api.json("/api/findings", { evaluation: evaluation() });
  const steps = await api.json("/api/steps", { evaluation: evaluation() });
  const rowByStep = new Map(steps.steps.map((step) => [step.step, step]));
  let cursor = steps.cursor;
  let ordered = [];
  const order = () => {
    ordered = [...rowByStep.values()].filter((step) => step.n > 0).sort((a, b) => a.step - b.step);
  };
  order();

  // ---- charts

  const group = chartGroup();
  const tables = new Set(params.get("tables", "").split(",").filter(Boolean));
  const onTable = (id) => (on) => {
    if (on) tables.add(id);
    else tables.delete(id);
    params.set({ tables: [...tables].sort().join(",") });
  };
  const onPick = (step) => context.go(link("step", step, { evaluation: evaluation() || null }));
  const onRange = (a, b) => context.go(link("compare", { a: a + "-" + a, b: b + "-" + b }));
  const shared = (id, title, help) => ({ title, help, group, onPick, onRange, table: tables.has(id), onTable: onTable(id) });
  let charts = [];
  const cards = el("div", { class: "cards" });

  const partNames = () => run.parts || [];
  function partPicker(names) {
    const now = params.get("part", "");
    return el("select", { class: "select", aria: { label: "Reward or reward part" }, on: { change: (event) => {
      params.set({ part: event.target.value });
      buildCards();
    } } },
      el("option", { value: "", text: "total", selected: now === "" }),
      el("option", { value: "*", text: "all parts", selected: now === "*" }),
      names.map((name) => el("option", { value: "=" + name, text: visible(name), selected: now === "=" + name })));
  }
  // KL and train-inference mismatch share a card: both are differences between two policies.
  function gapPicker(now) {
    return el("select", { class: "select", aria: { label: "KL or train-inference mismatch" }, on: { change: (event) => {
      params.set({ gap: event.target.value === "kl" ? null : event.target.value });
      buildCards();
    } } }, el("option", { value: "kl", text: "KL to the reference", selected: now === "kl" }), el("option", { value: "mismatch", text: "train-inference mismatch", selected: now === "mismatch" }));
  }
  const has = (id) => ordered.some((step) => step[id]);
  // While a run is being read, it is unknown what was recorded.
  const reading = () => !!run.progress && run.progress.total > run.progress.measured;
  const kinds = () => overviewCards.map((card) => has(card.id)).concat(reading()).join();
  let built = "";
  function buildCards() {
    for (const chart of charts) chart.destroy();
    charts = [];
    built = kinds();
    const nodes = [];
    const bothGaps = has("kl") && has("mismatch");
    const gap = bothGaps && params.get("gap") === "mismatch" ? "mismatch" : "kl";
    for (const card of overviewCards) {
      if (bothGaps && ["kl", "mismatch"].includes(card.id) && card.id !== gap) continue;
      const names = card.id === "reward" ? partNames() : [];
      const part = card.id === "reward" && names.length ? params.get("part", "") : "";
      if (!has(card.id) && !part) continue;
      const lines = part === "*" ? names.slice(0, 6) : part ? [part.slice(1)] : [];
      const chart = stepChart({
        ...shared(card.id, card.title, card.help), zero: card.zero, format: card.format || number,
        names: lines.map(visible), actions: names.length ? partPicker(names) : bothGaps && card.id === gap ? gapPicker(gap) : null,
      });
      chart.points = () => ordered.map((step) => ({ x: step.step, band: lines.length ? null : step[card.id], values: lines.length ? lines.map((name) => ((step.parts || {})[name] === undefined ? null : step.parts[name])) : null }));
      charts.push(chart);
      nodes.push(chart.root);
    }
    const bare = overviewCards.filter((card) => !has(card.id));
    const shares = stepChart({ ...shared("shares", "Shares", "Shares of samples (zero variance and solved: of groups)"), zero: true, format: percent, axis: percent, names: overviewShareNames });
    shares.points = () => ordered.map((step) => ({ x: step.step, band: null, values: overviewShares.map((name) => stepShare(step, name)) }));
    charts.push(shares);
    nodes.push(shares.root);
    if (bare.length && !reading()) {
      // Charts without data share one card that says what to record.
      nodes.push( el("section", { class: "panel chart not-recorded", aria: { label: "Not recorded" } },
        el("div", { class: "chart-head" }, el("h2", { text: "Not recorded" })),
        el("div", { class: "missing" }, bare.map((card) => el("p", null, el("b", { text: card.title }), el("span", { class: "muted", text: " · " + card.advice }))))));
    }
    empty(cards, nodes);
    feed();
  }
  function feed() {
    for (const chart of charts) chart.update(chart.points());
  }

  // ---- health

  const health = overviewHealth.map(([id, name, help, warn, bad]) => {
    const spark = sparkline([]);
    const value = el("span", { class: "value" });
    const node = explain(el("div", { class: "health-item", tabindex: "0", role: "group" }, el("span", { class: "name", text: name }), value, spark.canvas), name, help);
    return { id, name, help, warn, bad, spark, value, node };
  });
  function paintHealth() {
    const last = ordered[ordered.length - 1];
    for (const item of health) {
      const now = last ? stepShare(last, item.id) : null;
      const tone = item.bad !== null && now >= item.bad ? "bad" : item.warn !== null && now >= item.warn ? "warn" : "";
      item.value.textContent = percent(now);
      if (item.id === "solved" && now !== null) item.value.append(el("span", { class: "muted", text: " all " + percent(stepShare(last, "all_solved")) }));
      item.value.setAttribute("class", tone ? "value " + tone : "value");
      item.node.setAttribute("aria-label", item.name + " " + percent(now) + (tone === "bad" ? ", high" : tone === "warn" ? ", elevated" : "") + ". " + item.help);
      item.spark.redraw(ordered.map((step) => stepShare(step, item.id)));
    }
    healthStep.textContent = last ? "at step " + last.step : "";
  }
  const healthStep = el("span", { class: "muted" });

  // ---- findings

  const findingList = el("div", { class: "findings" });
  const findingCount = el("span", { class: "muted" });
  const findingsShown = 6;
  const fewSamples = 64;
  // Changed phrases and newly solved or broken prompts are on the compare page.
  function compareLink() {
    const quarter = Math.floor(ordered.length / 4);
    if (quarter < 1 || evaluation()) return null;
    const span = (list) => list[0].step + "-" + list[list.length - 1].step;
    return el("a", { class: "button small", href: link("compare", { a: span(ordered.slice(0, quarter)), b: span(ordered.slice(-quarter)) }), text: "Compare start and end",
      title: "Compare the first and last quarter of the steps: distributions, phrases, newly solved and newly broken prompts" });
  }
  function findingLink(item) {
    const filter = item.filter || "";
    if (filter) return link("samples", { filter });
    if (item.uids && item.uids.length === 1) return link("t", item.uids[0]);
    if (item.uids && item.uids.length) return link("samples", { filter: "uid in (" + item.uids.map((uid) => JSON.stringify(uid)).join(", ") + ")" });
    if (item.steps && item.steps[0] !== null && item.steps[0] !== undefined) return link("step", item.steps[1]);
    return null;
  }
  function paintFindings(answer) {
    const items = answer.items || [];
    const all = params.get("findings") === "all";
    findingCount.textContent = items.length ? plural(items.length, "finding") + ", most severe first" : "";
    if (!items.length) {
      empty(findingList, answer.error ? emptyState("The checks could not run", visible(answer.error))
        : el("div", { class: "finding-item" }, el("span", { class: "good" }, icon("check")), el("p", null, "No findings.", run.records < fewSamples ? el("span", { class: "muted", text: " Most checks need more samples." }) : null)));
      return;
    }
    empty(findingList,
      (all ? items : items.slice(0, findingsShown)).map((item) => {
        const tone = item.severity === "high" ? "bad" : item.severity === "medium" ? "warn" : "muted";
        const href = findingLink(item);
        const where = item.steps && item.steps[0] !== null && item.steps[0] !== undefined ? (item.steps[0] === item.steps[1] ? "step " + item.steps[0] : "steps " + item.steps[0] + "–" + item.steps[1]) : "";
        return el("article", { class: "finding-item" },
          el("span", { class: tone, role: "img", aria: { label: "severity: " + (item.severity === "high" ? "high" : item.severity === "medium" ? "medium" : "low") } }, icon(item.severity === "high" ? "high" : item.severity === "medium" ? "medium" : "low")),
          el("div", null,
            el("p", { class: "finding-title" }, visible(item.title), where ? el("span", { class: "steps", text: where }) : null),
            el("p", { class: "finding-detail", title: visible(item.recommendation || "") }, visible(item.detail || ""), item.recommendation ? el("span", { class: "advice", text: " → " + visible(item.recommendation) }) : null)),
          href ? el("a", { class: "button small", href, aria: { label: "Open: " + visible(item.title) } }, "Open" + (item.count ? " " + count(item.count) : "")) : el("span"));
      }),
      items.length > findingsShown ? el("div", { class: "finding-more" }, el("button", { class: "button small", type: "button", text: all ? "Show the first " + findingsShown : "Show all " + items.length, on: { click: () => {
        params.set({ loadFindings: all ? null : "all" });
        paintFindings(answer);
      } } })) : null);
  }

  // ---- steps

  const rows = heldRows((step) => step.step);
  const spread = (band) => (band ? number(band.p25, 2) + "  " + number(band.p50, 2) + "  " + number(band.p75, 2) : "–");
  const change = (step) => {
    const at = ordered.indexOf(step);
    const before = at > 0 ? ordered[at - 1] : null;
    if (!before || !before.reward || !step.reward) return "";
    const by = step.reward.mean - before.reward.mean;
    const text = number(by, 2);
    return el("span", { class: Number(by.toFixed(2)) === 0 ? "muted" : by > 0 ? "good" : "bad", text: (by > 0 && !/^0(\.0*)?$/.test(text) ? "+" : "") + text });
  };
  const middle = (id, format) => (step) => (step[id] ? format(step[id].mean) : "–");
  const share = (id) => (step) => percent(stepShare(step, id));
  const stepColumns = [
    { id: "step", label: "Step", width: "76px", num: true, sort: "step", first: "-", cell: (s) => el("a", { class: "row-link", href: link("step", s.step, { evaluation: evaluation() || null }), text: String(s.step), tabindex: "-1" }) },
    { id: "n", label: "Samples", width: "80px", num: true, sort: "n", first: "-", cell: (s) => count(s.n) },
    { id: "groups", label: "Groups", drop: 2, width: "76px", num: true, sort: "groups", first: "-", cell: (s) => count(s.groups) },
    { id: "reward", label: "Reward", help: "mean reward", width: "84px", num: true, sort: "reward", first: "-", cell: (s) => (s.reward ? number(s.reward.mean, 3) : "–") },
    { id: "change", label: "Δ", help: "change from the previous step", drop: 2, width: "80px", num: true, cell: change },
    { id: "spread", label: "25 / 50 / 75%", help: "quantiles of the reward", drop: 1, width: "150px", num: true, cell: (s) => spread(s.reward) },
    { id: "length", label: "Length", help: "mean response tokens", width: "80px", num: true, sort: "length", first: "-", cell: middle("length", compact) },
    { id: "entropy", label: "Entropy", help: "mean over trained tokens", width: "84px", num: true, sort: "entropy", first: "-", cell: middle("entropy", number) },
    { id: "kl", label: "KL", help: "to the reference, mean", drop: 2, width: "84px", num: true, sort: "kl", first: "-", cell: middle("kl", number) },
    { id: "zero_variance", label: "Zero var.", help: "groups whose samples all have the same reward", width: "84px", num: true, sort: "zero_variance", first: "-", cell: share("zero_variance") },
    { id: "solved", label: "Solved", help: "groups with at least one sample near the run's top reward", drop: 1, width: "84px", num: true, sort: "solved", first: "-", cell: share("solved") },
    { id: "truncated", label: "Truncated", width: "88px", num: true, sort: "truncated", first: "-", cell: share("truncated") },
    { id: "versions", label: "Policy", help: "policy versions of the samples", drop: 2, width: "110px", num: true, cell: (s) => (s.versions ? "v" + (s.versions[0] === s.versions[1] ? s.versions[0] : s.versions[0] + "–" + s.versions[1]) : "–") },
  ];
  const table = dataTable({
    label: "Steps", columns: stepColumns, source: rows, key: (step) => step.step,
    onOpen: (step) => onPick(step.step), onMove: (step) => {
      params.set({ at: step.step });
      group.point(step.step);
    },
    sort: params.get("sort", "-step"), onSort: (sort) => {
      params.set({ sort: sort === "-step" ? null : sort });
      sortRows();
      table.refresh();
    },
  });
  function sortRows() {
    const sort = params.get("sort", "-step");
    const name = sort.replace(/^-/, "");
    const way = sort.startsWith("-") ? -1 : 1;
    const read = (step) => {
      const value = step[name];
      return value !== null && typeof value === "object" ? value.mean : value;
    };
    const missing = (v) => v === null || v === undefined;
    rows.set([...ordered].sort((a, b) => {
      const [x, y] = [read(a), read(b)];
      if (missing(x) || missing(y)) return missing(x) - missing(y) || b.step - a.step;
      return way * (x - y) || b.step - a.step;
    }));
    foot.textContent = plural(ordered.length, "step");
  }
  const foot = el("span", { role: "status" });

  // ---- what could not be read

  const problems = el("div", { hidden: true });
  function paintProblems() {
    const list = run.problems || [];
    problems.hidden = !list.length;
    if (!list.length || Number(problems.dataset.count) === list.length) return;
    problems.dataset.count = String(list.length);
    empty(problems, el("details", { class: "notice", open: list.length === 1 || !ordered.length },
      el("summary", { text: "Read errors: " + plural(list.length, "problem") }),
      el("ul", null, list.map((text) => el("li", { text: visible(text) })))));
  }

  // ---- all together

  const swatch = (name) => el("span", { class: "swatch " + name, aria: { hidden: "true" } });
  const modes = ["Training", "Evaluation"].map((text, i) => el("button", { type: "button", text, aria: { pressed: String(evaluation() === i) }, on: { click: () => context.go(link({ evaluation: i || null }), { replace: true }) } }));
  const overviewFacts = el("span", { class: "muted" });
  function paintFacts() {
    const last = ordered[ordered.length - 1];
    const groups = ordered.reduce((sum, step) => sum + step.groups, 0);
    const samples = ordered.reduce((sum, step) => sum + step.n, 0);
    overviewFacts.textContent = last ? [plural(ordered.length, "step"), plural(groups, "group"), plural(samples, "sample"), last.versions ? "policy v" + last.versions[1] : ""].filter(Boolean).join(" · ") : "";
  }
  const heading = el("div", { class: "bar" },
    el("h1", { text: "Overview" }),
    overviewFacts,
    run.evaluation ? el("div", { class: "segmented", role: "group", aria: { label: "Which samples" } }, modes) : null,
    el("span", { class: "spring" }),
    !ordered.length ? null : el("span", { class: "legend muted" }, swatch("mean"), "mean", swatch("median"), "median", swatch("inner"), "25–75%", swatch("outer"), "5–95%", el("span", { text: "click to open a step, drag to compare two" })));
  if (!ordered.length) {
    empty(root, heading, problems, el("section", { class: "panel" }, emptyState(evaluation() ? "No evaluation samples yet" : "No samples yet",
      api.isStatic ? "This run is empty." : "This page updates automatically when samples are written.")));
  } else {
    empty(root, heading, problems, cards,
      el("section", { class: "panel", aria: { label: "Health" } }, el("div", { class: "panel-head" }, el("h2", { text: "Health" }), healthStep), el("div", { class: "health" }, health.map((item) => item.node))),
      el("section", { class: "panel", aria: { label: "Findings" } }, el("div", { class: "panel-head" }, el("h2", { text: "Findings" }), findingCount, el("span", { class: "spring" }), compareLink()), findingList),
      el("section", { class: "panel", aria: { label: "Steps" } }, el("div", { class: "panel-head" }, el("h2", { text: "Steps" }), el("span", { class: "muted", text: "newest first" })), table.root,
        tableFoot([foot], [el("span", { class: "muted" }, el("kbd", { text: "j" }), " ", el("kbd", { text: "k" }), " move · ", el("kbd", { text: "⏎" }), " open")])));
    paintFacts();
    buildCards();
    paintHealth();
    empty(findingList, el("div", { class: "finding-item" }, el("span"), el("p", { class: "muted", text: "Running checks…" })));
    loadFindings().catch((error) => ({ items: [], error: error.message })).then((answer) => !context.closed && paintFindings(answer));
    sortRows();
    table.refresh();
    const at = Number(params.get("at"));
    if (params.get("at") && rows.find(at) >= 0) table.mark(at);
  }

  paintProblems();

  const refreshFindings = debounce(async () => {
    if (context.closed) return;
    try {
      const answer = await loadFindings();
      const focusedIndex = [...findingList.querySelectorAll("a, button")].indexOf(document.activeElement);
      paintFindings(answer);
      const again = findingList.querySelectorAll("a, button")[focusedIndex];
      if (again) again.focus({ preventScroll: true });
    } catch {
      // the old findings stay
    }
  }, 2000);
  let asking = false;
  let again = false;
  async function update() {
    if (asking) {
      again = true;
      return;
    }
    asking = true;
    try {
      const answer = await api.json("/api/steps", { since: cursor, evaluation: evaluation() });
      if (context.closed) return;
      cursor = answer.cursor;
      if (!answer.steps.length) return;
      const first = !ordered.length;
      let added = 0;
      for (const step of answer.steps) {
        if (!rowByStep.has(step.step)) added += 1;
        rowByStep.set(step.step, step);
      }
      order();
      if (first) {
        context.go(location.hash, { replace: true });
        return;
      }
      if (reading()) run.progress = (await api.json("/api/run")).progress;
      if (context.closed) return;
      if (kinds() !== built) buildCards();
      else feed();
      paintFacts();
      paintHealth();
      sortRows();
      table.grew();
      if (added) context.announce("step " + ordered[ordered.length - 1].step);
      refreshFindings();
    } catch {
      // the next change asks again, from the same cursor
    } finally {
      asking = false;
      if (again) {
        again = false;
        update();
      }
    }
  }

  return {
    title: "Overview",
    crumbs: [],
    keys: [
      { key: ["j", "ArrowDown"], label: "next step", run: (event) => (event.key === "ArrowDown" && !table.root.contains(document.activeElement) ? false : table.move(1)) },
      { key: ["k", "ArrowUp"], label: "previous step", run: (event) => (event.key === "ArrowUp" && !table.root.contains(document.activeElement) ? false : table.move(-1)) },
      { key: "Enter", label: "open the step", run: (event) => table.open(event) },
    ],
    live() {
      paintProblems();
      update();
    },
    close() {
      table.destroy();
      for (const chart of charts) chart.destroy();
      for (const item of health) item.spark.destroy();
    },
  };
}
