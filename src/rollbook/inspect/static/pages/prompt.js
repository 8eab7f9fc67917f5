// prompt.js: one prompt over the whole training: every sample's reward, and two steps side by side.
// Invariant: the two steps that are compared, and the samples of them, are in the address.

import { count, el, empty, emptyState, number, plural, svg, visible } from "../dom.js";
import { plainTable } from "../charts.js";
import { diffView } from "../diff.js";
import { plotFigure, plotFrame, plotPath } from "../plots.js";

const promptMostDots = 3000; // beyond that a browser is slow, and the eye sees the band anyway

function promptQuantile(sorted, q) {
  if (!sorted.length) return null;
  const at = (sorted.length - 1) * q;
  const low = Math.floor(at);
  return sorted[low] + (sorted[Math.min(low + 1, sorted.length - 1)] - sorted[low]) * (at - low);
}

/** Rows of a prompt, by step: [{step, rows (best first), n, mean, p25, p50, p75, best}], in order. */
export function promptSteps(rows) {
  const steps = new Map();
  for (const row of rows) {
    if (!steps.has(row.step)) steps.set(row.step, []);
    steps.get(row.step).push(row);
  }
  const rank = (row) => (row.reward === null ? -Infinity : row.reward);
  return [...steps.entries()].sort((a, b) => a[0] - b[0]).map(([step, stepRows]) => {
    const rewards = stepRows.map((row) => row.reward).filter((r) => r !== null).sort((a, b) => a - b);
    const mean = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
    return { step, rows: [...stepRows].sort((a, b) => rank(b) - rank(a)), n: stepRows.length, mean, p25: promptQuantile(rewards, 0.25), p50: promptQuantile(rewards, 0.5), p75: promptQuantile(rewards, 0.75) };
  });
}

// Every sample a dot, the middle half a band, the mean a line; the steps that are compared below are marked.
function promptChart(steps, sides, choose, open) {
  const scored = steps.filter((s) => s.mean !== null);
  const rewards = scored.flatMap((s) => s.rows.map((row) => row.reward).filter((r) => r !== null));
  if (!rewards.length) return null;
  const low = Math.min(...rewards);
  const high = Math.max(...rewards);
  const pad = (high - low || 1) * 0.08;
  const first = steps[0].step;
  const last = steps[steps.length - 1].step;
  const side = (last - first || 1) * 0.03;
  const every = Math.max(1, Math.ceil(rewards.length / promptMostDots));
  let at = null; // the step under the pointer
  const frame = plotFrame({
    height: 220, label: "Reward of each sample of this prompt, by step", xs: [first - side, last + side], ys: [low - pad, high + pad], formatX: count, formatY: (v) => number(v, high - low < 0.5 ? 2 : 1), whole: true,
    draw: (area) => {
      const mark = (name, step) => [
        svg("line", { class: "plot-side-" + name, x1: area.x(step), x2: area.x(step), y1: area.top, y2: area.bottom }),
        svg("text", { class: "plot-side-name", x: area.x(step) + (name === "a" ? -8 : 8), y: area.top + 10 }, name.toUpperCase())];
      const edge = (key) => scored.map((s) => [area.x(s.step), area.y(s[key])]);
      let drawn = 0;
      return [
        at === null ? null : svg("line", { class: "plot-cursor", x1: area.x(at), x2: area.x(at), y1: area.top, y2: area.bottom }),
        mark("a", sides().a), mark("b", sides().b),
        scored.length > 1 ? svg("path", { class: "plot-band", d: plotPath([...edge("p75"), ...edge("p25").reverse()]) + "Z" }) : null,
        scored.length > 1 ? svg("path", { class: "plot-mean", d: plotPath(edge("mean")) }) : null,
        scored.map((s) => {
          const full = new Map(); // how many dots stand at a height already: the next stands beside them
          return s.rows.map((row, i) => {
            if (row.reward === null || (drawn += 1) % every) return null;
            const height = Math.round(area.y(row.reward) / 5);
            const before = Math.max(full.get(height - 1) || 0, full.get(height) || 0, full.get(height + 1) || 0);
            full.set(height, before + 1);
            const shift = Math.ceil(before / 2) * (before % 2 ? 7 : -7);
            return svg("circle", { class: "plot-dot" + (row.status === "finished" ? "" : " plot-dot-cut") + (row.evaluation ? " plot-dot-eval" : ""), cx: area.x(s.step) + shift, cy: area.y(row.reward), r: 3.5, data: { step: s.step, place: i } },
              svg("title", null, "step " + s.step + ", reward " + number(row.reward) + ", " + plural(row.length, "token") + (row.status === "finished" ? "" : ", " + row.status)));
          });
        }),
      ];
    },
  });
  const words = (s) => "step " + s.step + ": mean " + number(s.mean) + ", 25–75% " + number(s.p25) + " to " + number(s.p75) + ", " + plural(s.n, "sample");
  const figure = plotFigure({
    title: "Reward over training", help: "Dots: samples. Line: mean. Band: 25–75%", plot: frame.root,
    rows: () => plainTable(["step", "samples", "mean", "25%", "median", "75%", "best"], steps.map((s) => [String(s.step), count(s.n), number(s.mean), number(s.p25), number(s.p50), number(s.p75), number(s.rows[0].reward)])),
    note: el("figcaption", { class: "chart-note" }, "Click a dot to open the sample. Click a step to select it as side B, Shift-click as side A.", every > 1 ? " One dot in " + every + " is drawn." : ""),
  });
  const nearest = (event) => {
    const x = frame.area().back(event.clientX - frame.root.getBoundingClientRect().left);
    return steps.reduce((best, s) => (Math.abs(s.step - x) < Math.abs(best.step - x) ? s : best), steps[0]);
  };
  const hover = (s) => {
    if ((s ? s.step : null) === at) return;
    at = s ? s.step : null;
    figure.now.textContent = s ? words(s) : "";
    frame.root.setAttribute("aria-valuenow", String(s ? s.step : sides().b));
    frame.root.setAttribute("aria-valuetext", s ? words(s) : "");
    frame.redraw();
  };
  frame.root.tabIndex = 0;
  frame.root.setAttribute("role", "slider");
  frame.root.setAttribute("aria-label", "Reward over training: arrow keys move between steps, Enter selects side B, Shift and Enter side A");
  frame.root.setAttribute("aria-valuemin", String(first));
  frame.root.setAttribute("aria-valuemax", String(last));
  frame.root.setAttribute("aria-valuenow", String(sides().b));
  frame.root.addEventListener("pointermove", (event) => !event.target.closest("circle") && hover(nearest(event)));
  frame.root.addEventListener("pointerleave", () => hover(null));
  frame.root.addEventListener("blur", () => hover(null));
  frame.root.addEventListener("click", (event) => {
    const dot = event.target.closest("circle");
    if (dot) open(steps.find((s) => s.step === Number(dot.dataset.step)).rows[Number(dot.dataset.place)]);
    else choose(event.shiftKey ? "a" : "b", nearest(event).step);
  });
  frame.root.addEventListener("keydown", (event) => {
    const here = at === null ? steps.findIndex((s) => s.step === sides().b) : steps.findIndex((s) => s.step === at);
    const moves = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: steps.length - 1 };
    if (event.key in moves) hover(steps[Math.max(0, Math.min(steps.length - 1, moves[event.key]))]);
    else if (event.key === "Enter" && at !== null) choose(event.shiftKey ? "a" : "b", at);
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  return { root: figure.root, redraw: frame.redraw, destroy: frame.destroy };
}

/** Opens a prompt. */
export async function openPrompt(context) {
  const { root, params, api, link } = context;
  const answer = await api.json("/api/prompt", { prompt: context.path[1] || "" });
  const steps = promptSteps(answer.rows);
  const at = (step) => steps.find((s) => s.step === step);
  const stepParam = (name, otherwise) => (at(Number(params.get(name))) && params.get(name) !== undefined ? Number(params.get(name)) : otherwise);
  const sides = { a: stepParam("a", steps[0].step), b: stepParam("b", steps[steps.length - 1].step) };
  // With one step alone, its best sample stands beside its worst.
  const chosen = (side) => {
    const rows = at(sides[side]).rows;
    return rows.find((row) => row.uid === params.get("u" + side)) || (side === "b" && sides.a === sides.b ? rows[rows.length - 1] : rows[0]);
  };

  const chart = promptChart(steps, () => sides, pick, (row) => context.go(link("t", row.uid)));
  const body = el("div", { class: "prompt-diff" });
  const choosers = el("div", { class: "prompt-pair" });
  const pair = el("section", { class: "panel", aria: { label: "Two steps side by side" } },
    el("div", { class: "panel-head" }, el("h2", { text: "Side by side" }), el("span", { class: "muted", text: "words on one side only are highlighted" }), el("span", { class: "spring" }),
      el("button", { class: "button small", type: "button", text: "Swap", title: "Swap sides (s)", on: { click: swap } })),
    choosers, body);
  let turn = 0;

  function chooser(side) {
    const name = side === "a" ? "A" : "B";
    const step = el("select", { class: "select", aria: { label: "Step of side " + name }, on: { change: () => pick(side, Number(step.value)) } },
      steps.map((s) => el("option", { value: String(s.step), selected: s.step === sides[side], text: "step " + s.step + " · mean " + number(s.mean, 2) })));
    const row = chosen(side);
    const sample = el("select", { class: "select", aria: { label: "Sample of side " + name }, on: { change: () => {
      params.set({ ["u" + side]: at(sides[side]).rows[Number(sample.value)].uid });
      show();
    } } }, at(sides[side]).rows.map((optionRow, i) => el("option", { value: String(i), selected: optionRow.uid === row.uid, text: "#" + (i + 1) + " · reward " + number(optionRow.reward, 2) + " · " + plural(optionRow.length, "token") + (optionRow.status === "finished" ? "" : " · " + visible(optionRow.status)) })));
    return el("div", { class: "bar" }, el("span", { class: "side side-" + side, text: name }), step, sample, el("a", { class: "button small", href: link("t", row.uid), text: "Open" }));
  }
  function pick(side, step) {
    sides[side] = step;
    params.set({ [side]: step, ["u" + side]: null });
    if (chart) chart.redraw();
    show();
  }
  function swap() {
    const swapped = { a: sides.b, b: sides.a, ua: chosen("b").uid, ub: chosen("a").uid };
    sides.a = swapped.a;
    sides.b = swapped.b;
    params.set(swapped);
    if (chart) chart.redraw();
    show();
  }
  async function show() {
    const mine = (turn += 1);
    const focused = choosers.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
    empty(choosers, chooser("a"), chooser("b"));
    for (const node of choosers.querySelectorAll("select")) if (focused && node.getAttribute("aria-label") === focused) node.focus();
    try {
      const uids = [chosen("a").uid, chosen("b").uid];
      if (uids[0] === uids[1]) {
        empty(body, emptyState("The same sample on both sides", "Select another step or sample on one side."));
        return;
      }
      const trajectories = await api.frame(uids);
      if (mine !== turn || context.closed) return;
      empty(body, diffView(trajectories[0], trajectories[1], { by: "word", labels: ["a", "b"].map((side, i) => "step " + sides[side] + ", reward " + number(trajectories[i].reward)) }));
      context.announce("step " + sides.a + " beside step " + sides.b);
    } catch (error) {
      if (mine === turn && !context.closed) empty(body, emptyState("These samples are not available", visible(error.message)));
    }
  }

  const facts = el("p", { class: "muted" });
  const stepsBox = el("div", { class: "wide-table" });
  function paint() {
    const best = steps.reduce((a, b) => ((b.mean === null ? -Infinity : b.mean) > (a.mean === null ? -Infinity : a.mean) ? b : a));
    const scored = steps.filter((s) => s.mean !== null);
    facts.textContent = plural(steps.reduce((sum, s) => sum + s.n, 0), "sample") + " in " + plural(steps.length, "step")
      + (scored.length > 1 ? " · mean reward " + number(scored[0].mean, 2) + " at step " + scored[0].step + " → " + number(scored[scored.length - 1].mean, 2) + " at step " + scored[scored.length - 1].step + " · best at step " + best.step : "");
    empty(stepsBox, plainTable(["Step", "Samples", "Mean", "Median", "Best", "Worst", "Mean length", "Group"], [...steps].reverse().map((s) => [
      el("a", { href: link("step", s.step), text: String(s.step) }), count(s.n), number(s.mean, 3), number(s.p50, 3), number(s.rows[0].reward, 3), number(s.rows[s.rows.length - 1].reward, 3),
      count(s.rows.reduce((sum, row) => sum + row.length, 0) / s.n), el("a", { href: link("group", s.rows[0].gid), text: visible(s.rows[0].gid) })])));
  }
  paint();
  const fresh = el("button", { class: "button small", type: "button", hidden: true, text: "New samples: refresh", on: { click: () => context.go(link(...context.path, params.all())) } });
  empty(root, el("div", { class: "bar" }, el("h1", { text: "One prompt over training" }), fresh),
    el("section", { class: "panel panel-body prompt-opening", aria: { label: "Prompt" } }, el("p", { class: "prompt-words", text: visible(answer.opening || "(no text)") }), facts),
    chart ? chart.root : el("section", { class: "panel" }, emptyState("No sample of this prompt has a reward")), pair,
    el("section", { class: "panel", aria: { label: "Steps" } }, el("div", { class: "panel-head" }, el("h2", { text: "Steps" })), stepsBox));
  await show();
  const near = (side, by) => () => pick(side, steps[Math.max(0, Math.min(steps.length - 1, steps.findIndex((s) => s.step === sides[side]) + by))].step);
  let checking = false;
  return {
    title: "Prompt " + visible(answer.opening || answer.prompt).slice(0, 40),
    crumbs: [{ text: "prompt" }],
    keys: [
      { key: "]", label: "side B: next step", run: near("b", 1) },
      { key: "[", label: "side B: previous step", run: near("b", -1) },
      { key: "}", label: "side A: next step", run: near("a", 1) },
      { key: "{", label: "side A: previous step", run: near("a", -1) },
      { key: "s", label: "swap sides", run: swap },
    ],
    async live() {
      if (checking || !fresh.hidden) return;
      checking = true;
      try {
        const now = await api.json("/api/prompt", { prompt: context.path[1] });
        if (now.rows.length > answer.rows.length) fresh.hidden = false;
      } catch {
        // the next change asks again
      } finally {
        checking = false;
      }
    },
    close: () => chart && chart.destroy(),
  };
}
