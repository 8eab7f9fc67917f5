// compare.js: some steps against others: distributions, shares, phrases, prompts newly solved and newly broken.
// Invariant: A is what was, B what is; both spans are in the address, and every number says of how many samples it is.

import { compact, count, el, empty, emptyState, number, percent, plural, svg, visible } from "../dom.js";
import { plainTable } from "../charts.js";
import { plotFigure, plotFrame, plotPath } from "../plots.js";

// Two figures at least: 0.0072 against 0.0081 is a change, 0.008 against 0.008 would be none.
function compareFine(x) {
  return x !== null && x !== undefined && Math.abs(x) >= 0.0001 && Math.abs(x) < 0.1 ? x.toPrecision(2).replace("-", "−") : number(x);
}

const compareMetrics = [["reward", "Reward", number], ["length", "Response length", compact], ["entropy", "Entropy", number], ["kl", "KL to the reference", compareFine], ["mismatch", "Train-inference mismatch", compareFine], ["staleness", "Staleness", compact]];
const compareShares = [["truncated", "Truncated"], ["loops", "Loops"], ["errors", "Errors"], ["trained", "Trained on"], ["dropped", "Dropped"]];

/** What the test says, in words: [tone, words]. */
export function compareWords(p) {
  if (p === null || p === undefined) return ["", "not in both"];
  return p < 0.001 ? ["warn", "clear change"] : p < 0.05 ? ["", "change"] : ["", "no clear change"];
}

const compareTest = "Kolmogorov–Smirnov statistic of the group means of A and B, with a permutation p-value (groups permuted)";

// A mean with half the width of its 95 % interval.
function compareMean(side, format) {
  if (!side) return "–";
  return side.low === null ? format(side.mean) : format(side.mean) + " ± " + compareFine((side.high - side.low) / 2);
}

function compareChance(p) {
  return p < 0.001 ? "p < 0.001" : "p = " + number(p, 3);
}

function compareSpan(text) {
  const match = /^\s*(\d{1,15})\s*(?:(?:-|–|\.\.|to)\s*(\d{1,15}))?\s*$/.exec(text || "");
  if (!match) return null;
  const ends = [Number(match[1]), Number(match[2] === undefined ? match[1] : match[2])];
  return ends[0] <= ends[1] ? ends : [ends[1], ends[0]];
}

function compareName(span) {
  return span[0] === span[1] ? "step " + span[0] : "steps " + span[0] + "–" + span[1];
}

function compareSigned(value, format) {
  const text = format(value);
  return value > 0 && /[1-9]/.test(text) ? "+" + text : text;
}

// Two histograms on the same edges, each as a share of its side.
function compareOverlay(title, m, format) {
  const { edges } = m;
  const sums = [m.counts_a, m.counts_b].map((counts) => counts.reduce((a, b) => a + b, 0));
  const shares = [m.counts_a, m.counts_b].map((counts, i) => counts.map((n) => (sums[i] ? n / sums[i] : 0)));
  const most = Math.max(0.01, ...shares[0], ...shares[1]);
  let at = null;
  const bin = (i) => format(edges[i]) + " to " + format(edges[i + 1]) + ": A " + percent(shares[0][i]) + " (" + count(m.counts_a[i]) + "), B " + percent(shares[1][i]) + " (" + count(m.counts_b[i]) + ")";
  const outline = (area, share, closed) => {
    const points = [];
    if (closed) points.push([area.x(edges[0]), area.y(0)]);
    share.forEach((s, i) => points.push([area.x(edges[i]), area.y(s)], [area.x(edges[i + 1]), area.y(s)]));
    if (closed) points.push([area.x(edges[edges.length - 1]), area.y(0)]);
    return plotPath(points);
  };
  const frame = plotFrame({
    height: 160, label: title + ": shares of A and B", xs: [edges[0], edges[edges.length - 1]], ys: [0, most * 1.06], formatX: compact, formatY: percent,
    draw: (area) => [
      sums[0] ? svg("path", { class: "plot-a-fill", d: outline(area, shares[0], true) }) : null,
      sums[1] ? svg("path", { class: "plot-b-fill", d: outline(area, shares[1], true) }) : null,
      sums[0] ? svg("path", { class: "plot-a", d: outline(area, shares[0], true) }) : null,
      sums[1] ? svg("path", { class: "plot-b", d: outline(area, shares[1], true) }) : null,
      ["a", "b"].map((side) => (m[side] ? svg("path", { class: "plot-median-" + side, d: plotPath([[area.x(m[side].p50), area.top], [area.x(m[side].p50), area.bottom]]) }) : null)),
      at === null ? null : svg("rect", { class: "plot-here", x: area.x(edges[at]), y: area.top, width: Math.max(1, area.x(edges[at + 1]) - area.x(edges[at])), height: area.bottom - area.top }),
    ],
  });
  frame.root.tabIndex = 0;
  frame.root.setAttribute("role", "slider");
  frame.root.setAttribute("aria-label", title + ": arrow keys move between bars");
  frame.root.setAttribute("aria-valuemin", "0");
  frame.root.setAttribute("aria-valuemax", String(edges.length - 2));
  const [tone, words] = compareWords(m.p);
  const note = el("figcaption", { class: "compare-words" },
    el("span", { title: "mean and 95% confidence interval, clustered by group" }, "mean ", el("b", { text: compareMean(m.a, format) }), " → ", el("b", { text: compareMean(m.b, format) })),
    el("span", { class: tone ? "chip " + tone : "chip", text: words }),
    m.ks === null ? null : el("span", { title: compareTest, text: "KS " + number(m.ks, 2) + ", " + compareChance(m.p) }));
  const figure = plotFigure({
    title, help: "Share of each side's samples; vertical lines are medians", plot: frame.root, note,
    rows: () => plainTable(["from", "to", "A", "B"], edges.slice(1).map((edge, i) => [format(edges[i]), format(edge), count(m.counts_a[i]), count(m.counts_b[i])])),
  });
  function move(i) {
    const next = i === null ? null : Math.max(0, Math.min(edges.length - 2, i));
    if (next === at) return;
    at = next;
    figure.now.textContent = at === null ? "" : bin(at);
    frame.root.setAttribute("aria-valuenow", String(at === null ? 0 : at));
    frame.root.setAttribute("aria-valuetext", bin(at === null ? 0 : at));
    frame.redraw();
  }
  frame.root.setAttribute("aria-valuenow", "0");
  frame.root.setAttribute("aria-valuetext", bin(0));
  frame.root.addEventListener("pointermove", (event) => {
    const x = frame.area().back(event.clientX - frame.root.getBoundingClientRect().left);
    const index = edges.findIndex((edge, i) => i > 0 && x < edge);
    move(index < 0 ? edges.length - 2 : index - 1);
  });
  frame.root.addEventListener("pointerleave", () => move(null));
  frame.root.addEventListener("blur", () => move(null));
  frame.root.addEventListener("keydown", (event) => {
    const here = at === null ? -1 : at;
    const moves = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: edges.length - 2 };
    if (!(event.key in moves)) return;
    move(moves[event.key]);
    event.preventDefault();
    event.stopPropagation();
  });
  return { root: figure.root, destroy: frame.destroy };
}

// The run's mean reward, on which spans are drawn with the mouse.
function comparePicker(steps, spans, active, choose) {
  const rows = steps.filter((step) => step.n > 0 && step.reward);
  if (rows.length < 3) return null;
  const values = rows.map((step) => step.reward.mean);
  const low = Math.min(...values);
  const high = Math.max(...values);
  let drag = null;
  const frame = plotFrame({
    height: 96, label: "Mean reward per step, with A and B marked", xs: [rows[0].step, rows[rows.length - 1].step], ys: [low - (high - low || 1) * 0.08, high + (high - low || 1) * 0.08], formatX: compact, formatY: compact, whole: true,
    draw: (area) => {
      const band = (name, [first, last]) => {
        const from = Math.max(area.left, area.x(first - 0.5));
        const to = Math.min(area.right, area.x(last + 0.5));
        if (to <= from) return null;
        return [svg("rect", { class: "plot-span-" + name, x: from, y: area.top, width: Math.max(2, to - from), height: area.bottom - area.top }), svg("text", { class: "plot-span-name", x: from + 5, y: area.top + 12 }, name.toUpperCase())];
      };
      const shown = drag ? { ...spans, [active()]: drag } : spans;
      return [band("a", shown.a), band("b", shown.b), svg("path", { class: "plot-mean", d: plotPath(rows.map((step) => [area.x(step.step), area.y(step.reward.mean)])) })];
    },
  });
  frame.root.classList.add("compare-strip");
  const stepAt = (event) => {
    const x = frame.area().back(event.clientX - frame.root.getBoundingClientRect().left);
    return rows.reduce((best, step) => (Math.abs(step.step - x) < Math.abs(best - x) ? step.step : best), rows[0].step);
  };
  let from = null;
  frame.root.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    from = stepAt(event);
    drag = [from, from];
    frame.root.setPointerCapture(event.pointerId);
    frame.redraw();
  });
  frame.root.addEventListener("pointermove", (event) => {
    if (from === null) return;
    const to = stepAt(event);
    drag = [Math.min(from, to), Math.max(from, to)];
    frame.redraw();
  });
  frame.root.addEventListener("pointercancel", () => {
    from = drag = null;
    frame.redraw();
  });
  frame.root.addEventListener("pointerup", () => {
    if (from === null) return;
    from = null;
    choose(drag);
  });
  return frame;
}

function compareBars(a, b) {
  const words = "A " + percent(a) + ", B " + percent(b);
  return el("span", { class: "share-bars", role: "img", aria: { label: words }, title: words },
    el("i", { class: "share-a", style: { width: Math.round(a * 100) + "%" } }), el("i", { class: "share-b", style: { width: Math.round(b * 100) + "%" } }));
}

function compareSection(title, note, ...nodes) {
  return el("section", { class: "panel", aria: { label: title } }, el("div", { class: "panel-head" }, el("h2", { text: title }), el("span", { class: "muted", text: note })), el("div", { class: "wide-table" }, nodes));
}

function compareMoved(link, rows) {
  return plainTable(["Prompt", "Solved", "Mean of A", "of B", "Samples"], rows.map((row) => [
    el("a", { class: "compare-prompt", href: link("prompt", row.prompt), title: visible(row.opening), text: visible(row.opening || row.gid_b) }),
    row.solved_a + " → " + row.solved_b, number(row.a, 2), number(row.b, 2), el("span", { class: "muted", text: count(row.n_a) + " / " + count(row.n_b) })]));
}

function comparePhrases(link, rows, show) {
  const shown = rows.filter((row) => show === "all" || (show === "more" ? row.z > 0 : row.z < 0));
  if (!shown.length) return emptyState(rows.length ? "None" : "No phrase changed clearly");
  return plainTable(["Phrase", "", "In A", "In B", "Per response", "Reward corr.", ""], shown.map((row) => [
    el("a", { class: "compare-phrase", href: link("search", { q: '"' + row.phrase + '"' }), title: "Search for it", text: visible(row.phrase) }),
    compareBars(row.share_a, row.share_b), percent(row.share_a), percent(row.share_b),
    number(row.a, 2) + " → " + number(row.b, 2),
    row.reward === null ? "–" : el("span", { class: Math.abs(row.reward) < 0.1 ? "muted" : row.reward > 0 ? "good" : "bad", text: compareSigned(row.reward, (v) => number(v, 2)) }),
    row.uids.length ? el("a", { href: link("t", row.uids[row.uids.length - 1], { q: row.phrase }), text: "example", aria: { label: "Show a response with “" + visible(row.phrase) + "”" } }) : ""]));
}

/** Opens the comparison of two spans of steps. */
export async function openCompare(context) {
  const { root, params, run, api, link } = context;
  const steps = run.steps || {};
  if (!steps.count) {
    empty(root, el("h1", { text: "Compare" }), el("section", { class: "panel" }, emptyState("Nothing to compare yet", "Comparisons need at least one step.")));
    return { title: "Compare" };
  }
  const quarter = Math.max(0, Math.floor((steps.last - steps.first) / 4));
  const spans = { a: compareSpan(params.get("a")) || [steps.first, steps.first + quarter], b: compareSpan(params.get("b")) || [steps.last - quarter, steps.last] };
  const text = (span) => span.join("-");
  let active = params.get("pick") === "b" ? "b" : "a";
  const charts = [];
  const go = (next) => context.go(link("compare", { a: text(next.a), b: text(next.b), pick: next.pick, phrases: params.get("phrases") }));

  // ---- what is compared

  const boxes = {};
  for (const side of ["a", "b"]) boxes[side] = el("input", { class: "input span", value: text(spans[side]), spellcheck: "false", autocomplete: "off", aria: { label: "Steps of " + side.toUpperCase() } });
  const state = el("span", { class: "muted", role: "status" });
  const again = el("button", { class: "button small", type: "button", text: "New samples: refresh", hidden: true, on: { click: () => go(spans) } });
  const picks = ["a", "b"].map((side) => el("button", { type: "button", text: side.toUpperCase(), aria: { pressed: String(side === active) }, on: { click: () => {
    active = side;
    picks.forEach((button, i) => button.setAttribute("aria-pressed", String(["a", "b"][i] === side)));
    params.set({ pick: side === "b" ? "b" : null });
  } } }));
  const strip = el("div", { class: "compare-pick", hidden: true });
  const form = el("form", { class: "panel compare-form", on: { submit: (event) => {
    event.preventDefault();
    const next = { a: compareSpan(boxes.a.value), b: compareSpan(boxes.b.value) };
    for (const side of ["a", "b"]) boxes[side].setAttribute("aria-invalid", String(!next[side]));
    if (!next.a || !next.b) state.textContent = "Expected a step (7) or a range (3-9)";
    else go(next);
  } } },
    el("div", { class: "bar" },
      el("label", { class: "bar" }, el("span", { class: "side side-a", text: "A" }), boxes.a), el("span", { class: "muted", text: "against" }), el("label", { class: "bar" }, el("span", { class: "side side-b", text: "B" }), boxes.b),
      el("button", { class: "button primary", type: "submit", text: "Compare" }),
      el("button", { class: "button", type: "button", text: "Swap", title: "Swap A and B (s)", on: { click: swap } }), state, again),
    strip);
  function swap() {
    go({ a: spans.b, b: spans.a });
  }
  const body = el("div", { class: "page" }, el("p", { class: "muted", text: "Comparing " + compareName(spans.a) + " with " + compareName(spans.b) + "…" }));
  empty(root, el("h1", { text: "Compare steps" }), form, body);
  api.json("/api/steps", { evaluation: 0 }).then((answer) => {
    const picker = context.closed ? null : comparePicker(answer.steps.sort((a, b) => a.step - b.step), spans, () => active, (span) => go({ ...spans, [active]: span, pick: active === "a" ? "b" : null }));
    if (!picker) return;
    charts.push(picker);
    empty(strip, el("div", { class: "bar" }, el("span", { class: "muted", text: "Drag over steps to select" }), el("span", { class: "segmented", role: "group", aria: { label: "Side set by dragging" } }, picks)), picker.root);
    strip.hidden = false;
  }, () => {}); // without the strip there are still the boxes

  const page = {
    title: "Compare " + compareName(spans.a) + " with " + compareName(spans.b),
    crumbs: [{ text: "compare" }],
    keys: [{ key: "s", label: "swap A and B", run: swap }, { key: "i", label: "edit the steps of A", run: () => boxes.a.focus() }],
    live(change) {
      const inside = (step) => ["a", "b"].some((side) => step >= spans[side][0] && step <= spans[side][1]);
      if (change.steps && change.steps.some(inside)) again.hidden = false;
    },
    close: () => charts.forEach((chart) => chart.destroy()),
  };

  // ---- what came out

  const answer = await api.json("/api/compare", { a: text(spans.a), b: text(spans.b) });
  if (context.closed) return page;
  const sizes = ["a", "b"].map((side) => side.toUpperCase() + ": " + plural(answer[side].n, "sample") + " in " + plural(answer[side].groups, "group"));
  state.textContent = sizes.join(" · ");
  if (!answer.a.n || !answer.b.n) {
    empty(body, el("section", { class: "panel" }, emptyState("No samples in " + (answer.a.n ? "B, " + compareName(spans.b) : "A, " + compareName(spans.a)), "Steps " + steps.first + " to " + steps.last + " have samples.")));
    return page;
  }
  const there = compareMetrics.filter(([id]) => answer.metrics[id] && answer.metrics[id].edges.length);
  const plots = there.map(([id, name, format]) => {
    const plot = compareOverlay(name, answer.metrics[id], format);
    charts.push(plot);
    return plot.root;
  });
  const quantiles = (q, format) => (q ? [q.p5, q.p25, q.p50, q.p75, q.p95].map((v) => format(v)).join(" · ") : "–");
  const shifted = (m, format) => (m.shift === null ? "–" : compareSigned(m.shift, format) + (m.shift_low === null ? "" : " ± " + compareFine((m.shift_high - m.shift_low) / 2)));
  const shifts = plainTable(["", "Mean of A", "Mean of B", "Change", "A: 5 · 25 · 50 · 75 · 95%", "B: 5 · 25 · 50 · 75 · 95%", "KS"], there.map(([id, name, format]) => {
    const m = answer.metrics[id];
    return [name, compareMean(m.a, format), compareMean(m.b, format), shifted(m, format), quantiles(m.a, format), quantiles(m.b, format), m.ks === null ? "–" : number(m.ks, 2) + ", " + compareChance(m.p)];
  }));
  const tagged = (side, tag) => {
    const counts = answer.prompts.groups[side];
    return counts[tag] / (counts.none + counts.some + counts.all || 1);
  };
  const shares = plainTable(["", "A", "B", "Change"], compareShares.map(([id, name]) => {
    const share = answer.shares[id];
    return [name, percent(share.a), percent(share.b), compareSigned(share.b - share.a, percent).replace("-", "−")];
  }).concat(["none", "some", "all"].map((tag) => {
    const [solvedA, solvedB] = [tagged("a", tag), tagged("b", tag)];
    return ["Groups with " + tag + " solved", percent(solvedA), percent(solvedB), compareSigned(solvedB - solvedA, percent).replace("-", "−")];
  })));
  const means = (named) => Object.entries(named).map(([name, pair]) => [visible(name), number(pair.a), number(pair.b), pair.a === null || pair.b === null ? "–" : compareSigned(pair.b - pair.a, number)]);
  const numbers = [["Parts of the reward", means(answer.parts)], ["Metrics", means(answer.logged)]].filter(([, rows]) => rows.length);
  const prompts = answer.prompts;
  const phraseBox = el("div");
  const ways = [["all", "All"], ["more", "More in B"], ["less", "Less in B"]];
  let way = ways.some(([id]) => id === params.get("phrases")) ? params.get("phrases") : "all";
  const wayButtons = ways.map(([id, label]) => el("button", { type: "button", text: label, aria: { pressed: String(id === way) }, on: { click: () => {
    way = id;
    params.set({ phrases: id === "all" ? null : id });
    wayButtons.forEach((button, i) => button.setAttribute("aria-pressed", String(ways[i][0] === id)));
    empty(phraseBox, comparePhrases(link, answer.phrases, way));
  } } }));
  empty(phraseBox, comparePhrases(link, answer.phrases, way));
  const both = prompts.common ? plural(prompts.common, "prompt") + (prompts.common === 1 ? " is" : " are") + " in both ranges." : "No prompt is in both ranges. Choose ranges that share prompts, such as one epoch each.";
  empty(body,
    el("div", { class: "compare-legend" }, el("span", { class: "side side-a", text: "A" }), compareName(spans.a), el("span", { class: "side side-b", text: "B" }), compareName(spans.b), el("span", { class: "muted", text: "· vertical lines are medians" })),
    el("div", { class: "compare-plots" }, plots),
    el("div", { class: "compare-halves compare-moved" },
      compareSection("Newly solved", prompts.solved_from === null ? "" : plural(prompts.solved_count, "prompt") + " with more samples solved (reward of " + number(prompts.solved_from, 2) + " or more)", prompts.newly_solved.length ? compareMoved(link, prompts.newly_solved) : emptyState("None", both)),
      compareSection("Newly broken", prompts.solved_from === null ? "" : plural(prompts.broken_count, "prompt") + " with fewer samples solved", prompts.newly_broken.length ? compareMoved(link, prompts.newly_broken) : emptyState("None", both))),
    el("section", { class: "panel", aria: { label: "Phrases" } },
      el("div", { class: "panel-head" }, el("h2", { text: "Phrases" }), el("span", { class: "muted", text: "in " + count(answer.texts.a) + " responses of A and " + count(answer.texts.b) + " of B; “reward corr.” is the correlation of the phrase with the reward" }), el("span", { class: "spring" }), el("span", { class: "segmented small", role: "group", aria: { label: "Direction" } }, wayButtons)),
      el("div", { class: "wide-table" }, phraseBox)),
    compareSection("Shifts", "means with 95% confidence intervals, quantiles, and the KS distance of group means", shifts),
    el("div", { class: "compare-halves" }, compareSection("Shares", "of samples and of groups", shares), numbers.map(([name, rows]) => compareSection(name, "means", plainTable(["", "A", "B", "Change"], rows)))));
  context.announce(state.textContent);
  return page;
}
