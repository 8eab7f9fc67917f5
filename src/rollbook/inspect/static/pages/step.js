// step.js: one step: distributions, what changed, its groups and samples.
// Invariant: a step that still grows shows its new numbers at once, but its list waits until the reader asks.

import { compact, count, el, empty, emptyState, icon, number, percent, plural, stepShare } from "../dom.js";
import { histogram, scatter } from "../charts.js";
import { recordList } from "../lists.js";

const stepHistograms = [
  ["reward", "Reward", "reward", number],
  ["length", "Length", "response_tokens", compact],
  ["entropy", "Entropy", "entropy", number],
  ["advantage", "Advantage", "advantage", number],
];

function stepWords(p) {
  if (p === null || p === undefined) return "";
  if (p < 0.001) return "clear change";
  if (p < 0.05) return "a change";
  return "no clear change";
}

/** Opens a step. */
export async function openStep(context) {
  const { root, params, run, api, link } = context;
  const step = context.path[1] === undefined ? (run.steps || {}).last : Number(context.path[1]);
  if (!Number.isInteger(step)) throw Object.assign(new Error("“" + context.path[1] + "” is not a step number"), { status: 404 });
  const evaluation = params.get("evaluation") === "1" ? 1 : 0;
  const keep = { evaluation: evaluation || null };
  let answer = await api.json("/api/step", { step, evaluation });

  // ---- title

  const near = (which, label, key) => el("a", { class: "icon-button", title: label + " (" + key + ")", aria: { label } }, icon(which === "previous" ? "left" : "right"));
  const arrows = { previous: near("previous", "Previous step", "K"), next: near("next", "Next step", "J") };
  function aim(which) {
    const to = answer[which];
    const there = to !== null && to !== undefined;
    if (there) arrows[which].setAttribute("href", link("step", to, carried()));
    else arrows[which].removeAttribute("href");
    arrows[which].setAttribute("aria-disabled", String(!there));
  }
  // The filter and the view go along from step to step: what was looked for is looked for there too.
  function carried() {
    return { ...keep, view: params.get("view", null), filter: params.get("filter", null), sort: params.get("sort", null), tables: params.get("tables", null) };
  }
  const jump = el("input", { class: "input jump", type: "number", placeholder: "Go to step", aria: { label: "Go to step", keyshortcuts: "g" }, on: { keydown: (event) => {
    if (event.key === "Enter" && jump.value !== "") {
      event.preventDefault();
      context.go(link("step", Number(jump.value), carried()));
    }
  } } });
  const facts = el("span", { class: "muted" });
  const modes = ["Training", "Evaluation"].map((text, i) => el("button", { type: "button", text, aria: { pressed: String(evaluation === i) }, on: { click: () => context.go(link("step", step, { ...carried(), evaluation: i || null }), { replace: true }) } }));
  const title = el("div", { class: "step-title" }, arrows.previous, el("h1", { text: (evaluation ? "Evaluation at step " : "Step ") + step }), arrows.next,
    run.evaluation ? el("div", { class: "segmented", role: "group", aria: { label: "Which samples" } }, modes) : null, facts, el("span", { class: "spring" }), jump);
  function paintTitle() {
    const s = answer.summary;
    const words = [plural(s.groups, "group"), plural(s.n, "sample")];
    if (s.versions) words.push("policy v" + (s.versions[0] === s.versions[1] ? s.versions[0] : s.versions[0] + "–" + s.versions[1]));
    if (stepShare(s, "zero_variance") !== null) words.push("zero variance " + percent(s.zero_variance));
    words.push("truncated " + percent(s.truncated));
    facts.textContent = words.join(" · ");
    aim("previous");
    aim("next");
  }
  // A link is aimed when it is used: the filter may have changed since.
  for (const which of ["previous", "next"]) for (const event of ["pointerdown", "focus"]) arrows[which].addEventListener(event, () => aim(which));

  // ---- distributions

  const tables = new Set(params.get("tables", "").split(",").filter(Boolean));
  const onTable = (id) => (on) => {
    if (on) tables.add(id);
    else tables.delete(id);
    params.set({ tables: [...tables].sort().join(",") });
  };
  const plots = el("div", { class: "quad" });
  const missing = el("p", { class: "muted" });
  let charts = [];
  function pick(column) {
    return (low, high, last) => {
      const wide = Number(high) === Number(low);
      const text = wide ? column + " = " + exact(low) : column + " >= " + exact(low) + " and " + column + (last ? " <= " : " < ") + exact(high);
      list.show("samples");
      list.setFilter(text);
    };
  }
  const exact = (x) => String(Number(Number(x).toPrecision(12)));
  function paintPlots() {
    for (const chart of charts) chart.destroy();
    charts = [];
    const nodes = [];
    const none = [];
    for (const [id, name, column, format] of stepHistograms) {
      const distribution = (answer.histograms || {})[id];
      if (!distribution || !distribution.counts.length) {
        none.push(name.toLowerCase());
        continue;
      }
      const chart = histogram({ title: name, help: "Distribution over the step's samples; click a bar to list its samples", edges: distribution.edges, counts: distribution.counts, format, onPick: pick(column), table: tables.has(id), onTable: onTable(id) });
      charts.push(chart);
      nodes.push(chart.root);
    }
    const points = (answer.scatter || []).filter((p) => p[1] !== null);
    if (points.length) {
      const cut = points.some((p) => p[2] === "truncated");
      const chart = scatter({
        title: "Length × reward", help: "One point per sample; click to open it", points: points.map((p) => [p[0], p[1], p[2] === "truncated", answer.uids[p[3]]]),
        format: [count, number], heads: ["tokens", "reward", "truncated"], markWords: cut ? "✕ truncated" : plural(points.length, "sample"),
        words: (p) => count(p[0]) + " tokens, reward " + number(p[1]) + (p[2] ? ", truncated" : ""), onPick: (uid) => context.go(link("t", uid)), table: tables.has("scatter"), onTable: onTable("scatter"),
      });
      charts.push(chart);
      nodes.splice(1, 0, chart.root);
    }
    empty(plots, nodes);
    plots.style.setProperty("--plots", String(Math.max(1, nodes.length)));
    // While a run is being read, it is unknown what was recorded.
    const reading = run.progress && run.progress.total > run.progress.measured;
    missing.hidden = !none.length || !!reading;
    missing.textContent = none.length ? "Not recorded in this step: " + none.join(", ") + "." : "";
  }

  // ---- against the step before

  const versus = el("section", { class: "panel versus", aria: { label: "Change from the previous step" } });
  function paintVersus() {
    const before = answer.before;
    versus.hidden = !before;
    if (!before) return;
    const parts = [["reward", "reward", number], ["length", "length", compact], ["entropy", "entropy", number]]
      .filter(([id]) => (answer.versus || {})[id])
      .map(([id, name, format]) => {
        const v = answer.versus[id];
        const sign = v.shift > 0 ? "+" : "";
        return el("span", { title: "Kolmogorov–Smirnov distance of group means " + number(v.ks, 2) + ", p = " + number(v.p) + ": " + stepWords(v.p) },
          name + " ", el("b", { text: v.shift === null ? "–" : sign + format(v.shift) }), el("span", { class: v.p !== null && v.p < 0.05 ? "warn" : "muted", text: "  KS " + number(v.ks, 2) + ", p " + (v.p < 0.001 ? "< 0.001" : "= " + number(v.p, 3)) }));
      });
    empty(versus, el("h2", { text: "vs step " + before.step }), parts.length ? parts : el("span", { class: "muted", text: "nothing to compare" }), el("span", { class: "spring" }),
      el("a", { class: "button small", href: link("compare", { a: before.step + "-" + before.step, b: step + "-" + step }), text: "Compare " + before.step + " with " + step }));
  }

  const list = recordList(context, { step, views: ["groups", "samples"], label: "Groups and samples of step " + step });
  paintTitle();
  paintPlots();
  paintVersus();
  if (!answer.summary.n) empty(root, title, el("section", { class: "panel" }, emptyState("No samples in step " + step, "Steps " + (run.steps || {}).first + " to " + (run.steps || {}).last + " have samples.")));
  else empty(root, title, plots, missing, versus, list.root);

  let asking = false;
  async function live(change) {
    if (asking || (change.steps && !change.steps.includes(step) && answer.next !== null)) return;
    asking = true;
    try {
      const now = await api.json("/api/step", { step, evaluation });
      if (context.closed) return;
      const more = now.summary.n - answer.summary.n;
      const same = JSON.stringify(now.histograms) === JSON.stringify(answer.histograms);
      const inside = plots.contains(document.activeElement);
      answer = now;
      paintTitle();
      if (!same && !inside) paintPlots();
      if (!versus.contains(document.activeElement)) paintVersus();
      if (more > 0) list.grew(more);
    } catch {
      // the next change asks again
    } finally {
      asking = false;
    }
  }

  const goNear = (which) => () => {
    if (answer[which] === null || answer[which] === undefined) {
      context.announce(which === "next" ? "this is the last step" : "this is the first step");
      return;
    }
    context.go(link("step", answer[which], carried()));
  };
  return {
    title: (evaluation ? "Evaluation at step " : "Step ") + step,
    crumbs: [{ text: (evaluation ? "evaluation " : "") + "step " + step }],
    ready: list.ready(),
    keys: [
      ...list.keys,
      { key: "J", label: "next step", run: goNear("next") },
      { key: "K", label: "previous step", run: goNear("previous") },
      { key: "g", label: "go to a step", run: () => jump.focus() },
    ],
    live,
    close() {
      list.close();
      for (const chart of charts) chart.destroy();
    },
  };
}
