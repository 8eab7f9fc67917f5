// metrics.js: every number that the trainer logged, over the steps: loss, gradient norm, learning rate, evaluations, and the rest.
// Invariant: each logged name is on the page once; a search shows all names that match, whatever section they are in.

import { count, debounce, el, empty, emptyState, plural, visible } from "../dom.js";
import { chartGroup, stepChart } from "../charts.js";

const metricsFirst = ["loss", "grad_norm", "lr", "reward", "success", "entropy", "kl", "length", "policy/pg_clipfrac"];
const metricsHelp = {
  loss: "Mean loss of the step's updates",
  grad_norm: "Gradient norm before clipping",
  lr: "Learning rate",
  reward: "Mean reward of the records trained on in the step",
  success: "Share of the step's records that succeeded",
  entropy: "Mean entropy of the sampled tokens",
  kl: "KL to the reference policy; without one, KL between old and new policy in the step",
  length: "Mean response length in tokens",
  "policy/pg_clipfrac": "Share of tokens whose importance ratio was clipped",
};
const metricsEvaluation = "eval";
const metricsFewest = 3; // names of a section of their own

// About four figures, which tell 0.9812 from 0.9834.
function metricsNumber(x) {
  if (x === null || x === undefined || !Number.isFinite(x)) return "–";
  const size = Math.abs(x);
  if (Number.isInteger(x) && size < 1e9) return count(x);
  const text = size < 1e-3 || size >= 1e9 ? Number(x.toPrecision(4)).toExponential() : size >= 1000 ? count(x) : String(Number(x.toPrecision(4)));
  return text.replaceAll("-", "−");
}

// [[name of a section, its keys]], the names of intervals' ends left out: they belong to what they are the ends of.
function metricsSections(keys) {
  const ends = new Set();
  for (const key of keys) {
    if (keys.has(key + "/low") && keys.has(key + "/high")) ends.add(key + "/low").add(key + "/high");
  }
  const shown = [...keys].filter((key) => !ends.has(key));
  const first = metricsFirst.filter((key) => keys.has(key));
  const sections = new Map([["training", first], [metricsEvaluation, []]]);
  const rest = shown.filter((key) => !first.includes(key)).sort();
  const prefix = (key) => (/(^|\/)seconds$|_seconds$/.test(key) ? "time" : key.includes("/") ? key.slice(0, key.indexOf("/")) : "other");
  const sizes = new Map();
  for (const key of rest) sizes.set(prefix(key), (sizes.get(prefix(key)) || 0) + 1);
  const home = (key) => (sizes.get(prefix(key)) < metricsFewest && prefix(key) !== metricsEvaluation ? "other" : prefix(key));
  for (const name of [...new Set(rest.map(home))].sort((a, b) => (a === "other") - (b === "other") || (a < b ? -1 : 1))) {
    sections.set(name, rest.filter((key) => home(key) === name));
  }
  const lacksInterval = (key) => (ends.has(key + "/low") ? 0 : 1);
  sections.get(metricsEvaluation).sort((a, b) => lacksInterval(a) - lacksInterval(b)); // those with an interval come first
  return [...sections].filter(([, list]) => list.length);
}

/** Opens the metrics. */
export async function openMetrics(context) {
  const { root, params, api, link } = context;
  let rows = new Map(); // step -> {name: number}
  const keys = new Set();
  function take(answer) {
    let fresh = false;
    for (const [step, numbers] of answer.steps) {
      rows.set(step, numbers);
      for (const key of Object.keys(numbers)) {
        fresh ||= !keys.has(key);
        keys.add(key);
      }
    }
    return fresh;
  }
  take(await api.json("/api/metrics"));
  const ordered = () => [...rows].sort((a, b) => a[0] - b[0]);

  const facts = el("span", { class: "muted", role: "status" });
  const box = el("input", { class: "input", type: "search", placeholder: "Search names…", value: params.get("q", ""), spellcheck: "false", autocomplete: "off", aria: { label: "Search names" } });
  const body = el("div", { class: "page" });
  const tables = new Set(params.get("tables", "").split(",").filter(Boolean).map(decodeURIComponent));
  const group = chartGroup();
  let charts = new Map(); // key -> chart

  function points(key, list) {
    const series = [];
    for (const [step, numbers] of list) {
      const value = numbers[key];
      if (value === undefined) continue;
      if (typeof value !== "number") {
        series.push({ x: step, band: null, text: visible(value) });
        continue;
      }
      const [low, high] = [numbers[key + "/low"], numbers[key + "/high"]];
      const wide = typeof low === "number" && typeof high === "number";
      series.push({ x: step, band: { low: wide ? low : value, mean: value, high: wide ? high : value } });
    }
    return series;
  }
  function chart(key) {
    const evaluation = key.startsWith(metricsEvaluation + "/");
    const view = stepChart({
      title: visible(key), help: metricsHelp[key] || null, group, line: true, format: metricsNumber,
      onPick: (step) => context.go(link("step", step, { evaluation: evaluation ? 1 : null })),
      onRange: evaluation ? null : (a, b) => context.go(link("compare", { a: a + "-" + a, b: b + "-" + b })),
      table: tables.has(key), onTable: (on) => {
        if (on) tables.add(key);
        else tables.delete(key);
        params.set({ tables: [...tables].sort().map(encodeURIComponent).join(",") });
      },
    });
    charts.set(key, view);
    return view.root;
  }
  function feed(only) {
    const list = ordered();
    for (const [key, view] of charts) if (!only || only.includes(key)) view.update(points(key, list));
  }
  function destroy() {
    for (const view of charts.values()) view.destroy();
    charts = new Map();
  }
  function section(name, list) {
    const titles = { training: "Training", eval: "Evaluation", time: "Time", other: "Other" };
    const usual = name === "training" || name === metricsEvaluation;
    const openNames = new Set(params.get("open", "").split(",").filter(Boolean).map(decodeURIComponent));
    const cards = el("div", { class: "cards" });
    const fill = () => {
      if (cards.childElementCount) return;
      cards.append(...list.map(chart));
      feed(list);
    };
    const node = el("details", { class: "metrics-section", open: openNames.has(name) !== usual, on: { toggle: () => {
      if (node.open) fill();
      const now = new Set(params.get("open", "").split(",").filter(Boolean).map(decodeURIComponent));
      if (node.open !== usual) now.add(name);
      else now.delete(name);
      params.set({ open: [...now].sort().map(encodeURIComponent).join(",") });
    } } }, el("summary", null, el("h2", { text: titles[name] || visible(name) }), el("span", { class: "muted", text: plural(list.length, "name") })), cards);
    return { node, fill };
  }
  function build() {
    destroy();
    const words = box.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    const sections = metricsSections(keys);
    const steps = ordered();
    facts.textContent = steps.length ? plural(sections.reduce((sum, [, list]) => sum + list.length, 0), "name") + " · " + plural(steps.length, "step") + " · last " + steps[steps.length - 1][0] : "";
    if (!keys.size) {
      empty(body, el("section", { class: "panel" }, emptyState("No metrics yet", "Metrics logged by “rollbook train” or “book.log(step, {\"loss\": 0.5})” appear here.")));
      return;
    }
    if (words.length) {
      const matches = sections.flatMap(([, list]) => list).filter((key) => words.every((word) => key.toLowerCase().includes(word)));
      if (!matches.length) {
        empty(body, el("section", { class: "panel" }, emptyState("No matching name", "The search covers names such as " + visible([...keys][0]) + ".")));
        return;
      }
      empty(body, el("p", { class: "muted", role: "status", text: plural(matches.length, "name") + " found" }), el("div", { class: "cards" }, matches.map(chart)));
      feed();
      return;
    }
    const views = sections.map(([name, list]) => section(name, list));
    empty(body, views.map((view) => view.node));
    for (const view of views) if (view.node.open) view.fill();
  }
  const search = debounce(() => {
    if (context.closed) return;
    params.set({ q: box.value.trim() });
    build();
  }, 150);
  box.addEventListener("input", search);
  empty(root, el("div", { class: "bar" }, el("h1", { text: "Metrics" }), facts, el("span", { class: "spring" }), box), body);
  build();

  let asking = false;
  let again = false;
  async function update() {
    if (asking) {
      again = true;
      return;
    }
    asking = true;
    try {
      // The last step is asked for again: an evaluation may have been added to it.
      let answer = await api.json("/api/metrics", { since: Math.max(0, ...rows.keys()) });
      if (context.closed) return;
      const knownSteps = new Set([...rows.keys(), ...answer.steps.map(([step]) => step)]);
      if (knownSteps.size !== answer.count) {
        answer = await api.json("/api/metrics"); // the run was rewound
        if (context.closed) return;
        rows = new Map();
      }
      if (take(answer)) build();
      else feed();
      const steps = ordered();
      if (steps.length) facts.textContent = facts.textContent.replace(/ · [^·]* · last .*$/, " · " + plural(steps.length, "step") + " · last " + steps[steps.length - 1][0]);
    } catch {
      // the next change asks again
    } finally {
      asking = false;
      if (again) {
        again = false;
        update();
      }
    }
  }
  return {
    title: "Metrics",
    crumbs: [{ text: "metrics" }],
    keys: [{ key: "i", label: "search names", run: () => box.focus() }],
    live: update,
    close: destroy,
  };
}
