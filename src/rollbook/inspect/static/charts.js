// charts.js: curves with quantile bands, histograms, scatter plots and sparklines on canvas.
// Invariant: every chart has a label, can be read with the arrow keys, and can be shown as a table.

import { compact, count, el, empty, icon, number, themeColor } from "./dom.js";

const chartMargin = { left: 40, right: 10, top: 8, bottom: 20 };
const chartDashes = [[], [6, 3], [2, 2], [8, 3, 2, 3], [1, 3], [10, 4]];
const chartMaxRows = 400; // of a chart's table: the steps table below it has all

/** Charts of one group share the step under the pointer. */
export function chartGroup() {
  const members = new Set();
  return {
    members,
    point(step, from) {
      for (const member of members) member(step, from);
    },
  };
}

// ---- drawing

function chartTicks(low, high, most) {
  const span = high - low || Math.abs(high) || 1;
  const rough = span / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((k) => k * power).find((s) => s >= rough * 0.999) || 10 * power;
  const ticks = [];
  for (let t = Math.ceil(low / step - 1e-9) * step; t <= high + step * 1e-9; t += step) ticks.push(Math.abs(t) < step * 1e-9 ? 0 : t);
  return ticks;
}

function chartSurface(canvas) {
  const box = canvas.getBoundingClientRect();
  const scale = window.devicePixelRatio || 1;
  const width = Math.max(1, Math.round(box.width));
  const height = Math.max(1, Math.round(box.height));
  if (canvas.width !== Math.round(width * scale)) canvas.width = Math.round(width * scale);
  if (canvas.height !== Math.round(height * scale)) canvas.height = Math.round(height * scale);
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "11px " + (getComputedStyle(document.body).fontFamily || "sans-serif");
  return { pen, width, height };
}

function chartRange(values, zero) {
  let low = Infinity;
  let high = -Infinity;
  for (const v of values) {
    if (v === null || v === undefined || !Number.isFinite(v)) continue;
    if (v < low) low = v;
    if (v > high) high = v;
  }
  if (low === Infinity) return [0, 1];
  if (zero && low > 0) low = 0;
  if (zero && high < 0) high = 0;
  if (low === high) {
    const pad = Math.abs(low) * 0.5 || 1;
    return zero && low === 0 ? [0, 1] : [low - pad, high + pad];
  }
  const pad = (high - low) * 0.04;
  return [zero && low === 0 ? 0 : low - pad, high + pad];
}

function chartAxes(pen, area, xs, ys, formatX, formatY, most = Math.max(2, Math.floor(area.height / 30))) {
  pen.lineWidth = 1;
  pen.strokeStyle = themeColor("--line");
  pen.fillStyle = themeColor("--muted");
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  for (const t of chartTicks(ys[0], ys[1], most)) {
    const y = Math.round(area.y(t)) + 0.5;
    pen.beginPath();
    pen.moveTo(area.left, y);
    pen.lineTo(area.right, y);
    pen.stroke();
    pen.fillText(formatY(t), area.left - 6, y);
  }
  pen.textBaseline = "top";
  let last = -Infinity;
  for (const t of xs) {
    const text = formatX(t);
    const half = pen.measureText(text).width / 2;
    const x = Math.min(Math.max(area.x(t), area.left + half - 4), area.right - half + 4);
    if (x - half < last + 10) continue;
    pen.textAlign = "center";
    pen.fillText(text, x, area.bottom + 6);
    last = x + half;
  }
}

function chartArea(width, height, xs, ys, left = chartMargin.left) {
  const right = width - chartMargin.right;
  const top = chartMargin.top;
  const bottom = height - chartMargin.bottom;
  const spanX = xs[1] - xs[0] || 1;
  const spanY = ys[1] - ys[0] || 1;
  const mid = xs[1] === xs[0];
  return {
    left, right, top, bottom, height: bottom - top, width: right - left,
    x: (v) => (mid ? (left + right) / 2 : left + ((v - xs[0]) / spanX) * (right - left)),
    y: (v) => bottom - ((v - ys[0]) / spanY) * (bottom - top),
    backX: (p) => (mid ? xs[0] : xs[0] + ((p - left) / (right - left)) * spanX),
  };
}

// Ticks with as many decimals as tell them apart; very small and very large ones with a power of ten.
function chartTickFormat(low, high, most) {
  const ticks = chartTicks(low, high, most);
  const step = ticks.length > 1 ? ticks[1] - ticks[0] : Math.abs(high - low) || 1;
  const size = Math.max(Math.abs(low), Math.abs(high));
  let decimals = 0;
  while (decimals < 9 && Math.abs(step * 10 ** decimals - Math.round(step * 10 ** decimals)) > 1e-6) decimals += 1;
  if (size >= 10000) return compact;
  if (size >= 0.01) return (t) => t.toFixed(decimals).replace("-", "−");
  return (t) => (t === 0 ? "0" : t.toExponential(Math.max(0, Math.min(2, Math.floor(Math.log10(Math.abs(t)) + 1e-9) + decimals))).replace(/\.?0*e/, "e").replaceAll("-", "−"));
}

// ---- the frame around a chart

function chartFrame(options, draw) {
  const canvas = el("canvas", { role: "img", aria: { label: options.title } });
  const hit = el("div", { class: "chart-hit", tabindex: "0", role: "slider", aria: { label: options.title + (options.hint ? ": " + options.hint : ""), valuemin: "0", valuemax: "0", valuenow: "0" } });
  const box = el("div", { class: "chart-box" }, canvas, hit);
  const now = el("span", { class: "chart-now" });
  const note = el("figcaption", { class: "chart-note", hidden: true });
  const table = el("div", { class: "chart-table", tabindex: "0", role: "region", aria: { label: options.title + ", as a table" }, hidden: true });
  const toggle = el("button", { class: "icon-button small", type: "button", title: "Show as a table", aria: { label: options.title + ": table", pressed: "false" }, on: { click: () => flip(table.hidden, true) } }, icon("table"));
  const root = el("figure", { class: "panel chart" },
    el("div", { class: "chart-head" }, el("h2", { text: options.title, title: options.help || null }), options.actions || null, now, toggle),
    box, table, note);
  let frameRequest = 0;
  function redraw() {
    if (frameRequest) return;
    frameRequest = requestAnimationFrame(() => {
      frameRequest = 0;
      if (box.isConnected && !box.hidden) draw(canvas);
    });
  }
  function flip(on, tell) {
    table.hidden = !on;
    box.hidden = on;
    toggle.setAttribute("aria-pressed", String(on));
    if (on) empty(table, frame.rows());
    else redraw();
    if (tell && options.onTable) options.onTable(on);
  }
  const watch = new ResizeObserver(redraw);
  watch.observe(box);
  document.addEventListener("themechange", redraw);
  const frame = {
    root, canvas, hit, now, note, redraw, flip,
    rows: () => [],
    refresh() {
      if (!table.hidden) empty(table, frame.rows());
      redraw();
    },
    destroy() {
      watch.disconnect();
      document.removeEventListener("themechange", redraw);
      cancelAnimationFrame(frameRequest);
    },
  };
  return frame;
}

/** A plain table of texts: what a chart turns into. */
export function plainTable(heads, rows) {
  return el("table", { class: "plain" },
    el("thead", null, el("tr", null, heads.map((h) => el("th", { scope: "col", text: h })))),
    el("tbody", null, rows.map((row) => el("tr", null, row.map((cell, i) => el(i ? "td" : "th", { scope: i ? null : "row" }, cell))))));
}

// ---- curves

function chartColumns(points, area) {
  // One column a pixel at most: ten thousand steps draw as fast as a thousand, and no spike is lost from the outer band.
  if (points.length <= area.width) return points;
  const columns = [];
  let bucket = [];
  let at = null;
  const flush = () => {
    if (!bucket.length) return;
    const bands = bucket.map((p) => p.band).filter(Boolean);
    const mean = (key) => bands.reduce((sum, b) => sum + b[key], 0) / bands.length;
    columns.push({
      x: bucket[bucket.length - 1].x,
      band: !bands.length ? null : bands[0].low !== undefined ? { low: Math.min(...bands.map((b) => b.low)), high: Math.max(...bands.map((b) => b.high)), mean: mean("mean") } : { p5: Math.min(...bands.map((b) => b.p5)), p25: mean("p25"), p50: mean("p50"), p75: mean("p75"), p95: Math.max(...bands.map((b) => b.p95)), mean: mean("mean") },
      values: bucket[0].values ? bucket[0].values.map((_, i) => {
        const there = bucket.map((p) => p.values[i]).filter((v) => v !== null && v !== undefined);
        return there.length ? there.reduce((a, b) => a + b, 0) / there.length : null;
      }) : null,
    });
    bucket = [];
  };
  for (const point of points) {
    const pixel = Math.round(area.x(point.x));
    if (pixel !== at) flush();
    at = pixel;
    bucket.push(point);
  }
  flush();
  return columns;
}

function chartBand(pen, area, points, low, high, color) {
  pen.fillStyle = color;
  let run = [];
  const flush = () => {
    if (run.length === 1) {
      const x = area.x(run[0].x);
      pen.fillRect(x - 3, area.y(run[0].band[high]), 6, Math.max(1, area.y(run[0].band[low]) - area.y(run[0].band[high])));
    } else if (run.length) {
      pen.beginPath();
      run.forEach((p, i) => pen[i ? "lineTo" : "moveTo"](area.x(p.x), area.y(p.band[high])));
      for (let i = run.length - 1; i >= 0; i -= 1) pen.lineTo(area.x(run[i].x), area.y(run[i].band[low]));
      pen.closePath();
      pen.fill();
    }
    run = [];
  };
  for (const point of points) {
    if (point.band) run.push(point);
    else flush();
  }
  flush();
}

function chartLine(pen, area, points, read, color, dash, wide) {
  pen.strokeStyle = color;
  pen.fillStyle = color;
  pen.lineWidth = wide;
  pen.lineJoin = "round";
  pen.setLineDash(dash);
  let run = [];
  const flush = () => {
    if (run.length === 1) {
      pen.beginPath();
      pen.arc(run[0][0], run[0][1], 3, 0, 7);
      pen.fill();
    } else if (run.length) {
      pen.beginPath();
      run.forEach(([x, y], i) => pen[i ? "lineTo" : "moveTo"](x, y));
      pen.stroke();
    }
    run = [];
  };
  for (const point of points) {
    const value = read(point);
    if (value === null || value === undefined) flush();
    else run.push([area.x(point.x), area.y(value)]);
  }
  flush();
  pen.setLineDash([]);
}

/**
 * Curves over steps. options: {title, help, group, zero (the axis holds 0), format(value), names: [of lines], onPick(step), onRange(a, b),
 * table (bool), onTable(bool), actions (node), hint, line (a band is one value and its interval: {low, mean, high}, all the same without one)}.
 * update(points): [{x: step, band: {p5, p25, p50, p75, p95, mean} or null, values: [a line's value] or null, text: what stands for a value that is no number}].
 */
export function stepChart(options) {
  const format = options.format || number;
  let points = [];
  let names = options.names || [];
  let at = null; // the step under the pointer, or of the keys
  let drag = null; // {from, to} in steps
  let area = null;
  let ready = null; // what does not change while the pointer moves

  const frame = chartFrame({ ...options, hint: "arrow keys move between steps, Enter opens a step, Shift and arrow keys select two steps to compare" }, draw);
  const legend = names.map((name, i) => ({ name, value: el("b"), swatch: el("canvas", { width: "36", height: "20", aria: { hidden: "true" } }), i }));

  function nearest(x) {
    let low = 0;
    let high = points.length - 1;
    while (low < high) {
      const mid = (low + high) >> 1;
      if (points[mid].x < x) low = mid + 1;
      else high = mid;
    }
    if (low > 0 && Math.abs(points[low - 1].x - x) <= Math.abs(points[low].x - x)) low -= 1;
    return low;
  }
  function shown() {
    if (!points.length) return null;
    if (at !== null) return points[nearest(at)];
    return points[points.length - 1];
  }
  function words(point) {
    if (!point) return "";
    if (names.length) return names.map((name, i) => name + " " + format(point.values ? point.values[i] : null)).join(", ");
    const b = point.band;
    if (options.line) return b ? format(b.mean) + (b.low < b.high ? ", interval " + format(b.low) + " to " + format(b.high) : "") : point.text || "not recorded";
    return b ? "mean " + format(b.mean) + ", median " + format(b.p50) + ", 25–75% " + format(b.p25) + " to " + format(b.p75) + ", 5% to 95% " + format(b.p5) + " to " + format(b.p95) : "not recorded";
  }
  function say() {
    const point = shown();
    if (!point) return;
    if (drag) empty(frame.now, "compare ", el("b", { text: String(drag.from) }), " with ", el("b", { text: String(drag.to) }));
    else if (names.length) empty(frame.now, "step " + point.x);
    else if (options.line) empty(frame.now, "step " + point.x + "  ", el("b", { text: point.band ? format(point.band.mean) : point.text || "–" }), point.band && point.band.low < point.band.high ? "  " + format(point.band.low) + " – " + format(point.band.high) : "");
    else if (point.band) empty(frame.now, "step " + point.x + "  ", el("b", { text: format(point.band.mean) }), "  " + format(point.band.p25) + " – " + format(point.band.p75));
    else empty(frame.now, "step " + point.x + "  –");
    frame.now.title = names.length || drag || options.line ? "" : "step, mean, and 25–75% of its samples";
    for (const item of legend) item.value.textContent = format(point.values ? point.values[item.i] : null);
    frame.hit.setAttribute("aria-valuenow", String(point.x));
    frame.hit.setAttribute("aria-valuetext", (drag ? "compare step " + drag.from + " with step " + drag.to + ". " : "") + "step " + point.x + ": " + words(point));
  }
  function draw(canvas) {
    const { pen, width, height } = chartSurface(canvas);
    if (!points.length) return;
    const xs = [points[0].x, points[points.length - 1].x];
    if (!ready || ready.points !== points || ready.width !== width) {
      const values = [];
      for (const p of points) {
        if (p.band) values.push(...(options.line ? [p.band.low, p.band.high] : [p.band.p5, p.band.p95, p.band.mean]));
        if (p.values) values.push(...p.values);
      }
      const ys = chartRange(values, options.zero);
      ready = { points, width, ys, columns: chartColumns(points, chartArea(width, height, xs, ys)) };
    }
    const { ys, columns } = ready;
    const most = options.line ? Math.max(3, Math.floor((height - chartMargin.top - chartMargin.bottom) / 24)) : undefined;
    const formatY = options.axis || (options.line ? chartTickFormat(ys[0], ys[1], most) : compact);
    const wide = options.line ? Math.max(...chartTicks(ys[0], ys[1], most).map((t) => pen.measureText(formatY(t)).width)) + 8 : 0;
    area = chartArea(width, height, xs, ys, Math.max(chartMargin.left, wide));
    const few = xs[0] === xs[1] ? [xs[0]] : [...new Set([xs[0], ...chartTicks(xs[0], xs[1], 5).filter(Number.isInteger), xs[1]])].sort((a, b) => a - b);
    const ends = few.filter((t) => t === xs[0] || t === xs[1] || (area.x(t) - area.left > 28 && area.right - area.x(t) > 36));
    chartAxes(pen, area, ends, ys, compact, formatY, most);
    if (drag) {
      pen.fillStyle = themeColor("--band-outer");
      pen.fillRect(Math.min(area.x(drag.from), area.x(drag.to)), area.top, Math.abs(area.x(drag.to) - area.x(drag.from)), area.height);
    }
    if (names.length) {
      names.forEach((_, i) => chartLine(pen, area, columns, (p) => (p.values ? p.values[i] : null), themeColor("--series-" + ((i % 6) + 1)), chartDashes[i % 6], 1.75));
    } else if (options.line) {
      chartBand(pen, area, columns, "low", "high", themeColor("--band-inner"));
      chartLine(pen, area, columns, (p) => (p.band ? p.band.mean : null), themeColor("--accent"), [], 2);
      if (columns.length <= 24) for (const p of columns) if (p.band) chartLine(pen, area, [p], () => p.band.mean, themeColor("--accent"), [], 2); // few values are seen one by one
    } else {
      chartBand(pen, area, columns, "p5", "p95", themeColor("--band-outer"));
      chartBand(pen, area, columns, "p25", "p75", themeColor("--band-inner"));
      chartLine(pen, area, columns, (p) => (p.band ? p.band.p50 : null), themeColor("--muted"), [4, 3], 1.25);
      chartLine(pen, area, columns, (p) => (p.band ? p.band.mean : null), themeColor("--accent"), [], 2);
    }
    const mark = (step, color) => {
      const x = Math.round(area.x(step)) + 0.5;
      pen.strokeStyle = color;
      pen.lineWidth = 1;
      pen.beginPath();
      pen.moveTo(x, area.top);
      pen.lineTo(x, area.bottom);
      pen.stroke();
    };
    if (drag) {
      mark(drag.from, themeColor("--accent"));
      mark(drag.to, themeColor("--accent"));
    } else if (at !== null) {
      const point = shown();
      mark(point.x, themeColor("--muted"));
      const dots = names.length ? (point.values || []).map((v, i) => [v, "--series-" + ((i % 6) + 1)]) : point.band ? [[point.band.mean, "--accent"]] : [];
      for (const [value, name] of dots) {
        if (value === null || value === undefined) continue;
        pen.fillStyle = themeColor(name);
        pen.strokeStyle = themeColor("--panel");
        pen.lineWidth = 2;
        pen.beginPath();
        pen.arc(area.x(point.x), area.y(value), 4, 0, 7);
        pen.fill();
        pen.stroke();
      }
    }
    for (const item of legend) {
      const ink = item.swatch.getContext("2d");
      ink.setTransform(2, 0, 0, 2, 0, 0);
      ink.clearRect(0, 0, 18, 10);
      ink.strokeStyle = themeColor("--series-" + ((item.i % 6) + 1));
      ink.lineWidth = 2;
      ink.setLineDash(chartDashes[item.i % 6]);
      ink.beginPath();
      ink.moveTo(0, 5);
      ink.lineTo(18, 5);
      ink.stroke();
    }
  }
  function point(step) {
    at = step;
    say();
    frame.redraw();
  }
  function tell(step) {
    if (options.group) options.group.point(step);
    else point(step);
  }
  function stepAt(event) {
    const box = frame.hit.getBoundingClientRect();
    return points[nearest(area ? area.backX(event.clientX - box.left) : 0)].x;
  }
  let pressed = null;
  frame.hit.addEventListener("pointermove", (event) => {
    if (!points.length) return;
    const step = stepAt(event);
    if (pressed && Math.abs(event.clientX - pressed.x) > 6 && options.onRange) drag = { from: pressed.step, to: step };
    tell(step);
  });
  frame.hit.addEventListener("pointerleave", () => !pressed && tell(null));
  frame.hit.addEventListener("pointerdown", (event) => {
    if (event.button || !points.length) return;
    pressed = { x: event.clientX, step: stepAt(event) };
    frame.hit.setPointerCapture(event.pointerId);
  });
  frame.hit.addEventListener("pointercancel", () => {
    pressed = drag = null;
    frame.redraw();
  });
  frame.hit.addEventListener("pointerup", () => {
    if (!pressed) return;
    const chosen = drag;
    const step = pressed.step;
    pressed = drag = null;
    frame.redraw();
    if (chosen && chosen.from !== chosen.to) options.onRange(Math.min(chosen.from, chosen.to), Math.max(chosen.from, chosen.to));
    else if (!chosen && options.onPick) options.onPick(step);
  });
  frame.hit.addEventListener("keydown", (event) => {
    if (!points.length || event.ctrlKey || event.metaKey || event.altKey) return;
    const here = points.indexOf(shown());
    const moves = { ArrowLeft: here - 1, ArrowRight: here + 1, PageUp: here - 10, PageDown: here + 10, Home: 0, End: points.length - 1 };
    if (event.key in moves) {
      const next = points[Math.min(points.length - 1, Math.max(0, moves[event.key]))].x;
      drag = event.shiftKey && options.onRange ? { from: drag ? drag.from : points[here].x, to: next } : null;
      tell(next);
    } else if (event.key === "Enter") {
      const chosen = drag;
      drag = null;
      if (chosen && chosen.from !== chosen.to) options.onRange(Math.min(chosen.from, chosen.to), Math.max(chosen.from, chosen.to));
      else if (options.onPick) options.onPick(shown().x);
    } else if (event.key === "Escape" && drag) {
      drag = null;
      say();
      frame.redraw();
    } else return;
    event.preventDefault();
    event.stopPropagation();
  });
  frame.hit.addEventListener("blur", () => {
    drag = null;
    tell(null);
  });
  if (options.group) options.group.members.add(point);
  frame.rows = () => {
    const rows = points.slice(-chartMaxRows).reverse();
    const cut = points.length > rows.length ? el("p", { class: "muted panel-body", text: "the last " + count(rows.length) + " steps; the table of steps lists all" }) : null;
    if (names.length) return [plainTable(["step", ...names], rows.map((p) => [String(p.x), ...names.map((_, i) => format(p.values ? p.values[i] : null))])), cut];
    if (options.line) {
      const wide = points.some((p) => p.band && p.band.low < p.band.high);
      return [plainTable(wide ? ["step", "value", "low", "high"] : ["step", "value"], rows.map((p) => [String(p.x), p.band ? format(p.band.mean) : p.text || "–", ...(wide ? [format(p.band ? p.band.low : null), format(p.band ? p.band.high : null)] : [])])), cut];
    }
    const keys = ["p5", "p25", "p50", "p75", "p95", "mean"];
    return [plainTable(["step", "5%", "25%", "median", "75%", "95%", "mean"], rows.map((p) => [String(p.x), ...keys.map((k) => format(p.band ? p.band[k] : null))])), cut];
  };
  if (names.length) {
    frame.note.hidden = false;
    empty(frame.note, legend.map((item) => el("span", { class: "key-line" }, item.swatch, item.name, item.value)));
  }
  if (options.table) frame.flip(true, false);
  return {
    root: frame.root,
    update(list) {
      points = list;
      if (points.length) {
        frame.hit.setAttribute("aria-valuemin", String(points[0].x));
        frame.hit.setAttribute("aria-valuemax", String(points[points.length - 1].x));
        const last = points[points.length - 1];
        frame.canvas.setAttribute("aria-label", options.title + ", " + count(points.length) + " steps; step " + last.x + ": " + words(last));
      }
      say();
      frame.refresh();
    },
    destroy() {
      if (options.group) options.group.members.delete(point);
      frame.destroy();
    },
  };
}

// ---- histogram

/**
 * A histogram. options: {title, help, edges: [n + 1], counts: [n], before: {edges, counts} or null (drawn as an outline), format, onPick(low, high, last),
 * pickWords, table, onTable}.
 */
export function histogram(options) {
  const { edges, counts } = options;
  const format = options.format || number;
  const total = counts.reduce((a, b) => a + b, 0);
  let at = null;
  let area = null;
  const frame = chartFrame({ ...options, hint: "arrow keys move between bars" + (options.onPick ? ", Enter lists the samples of a bar" : "") }, draw);

  function bar(i) {
    return format(edges[i]) + (edges[i] === edges[i + 1] ? "" : " to " + format(edges[i + 1])) + ": " + count(counts[i]) + (total ? " (" + Math.round((100 * counts[i]) / total) + "%)" : "");
  }
  function say() {
    if (at === null) empty(frame.now, count(total));
    else empty(frame.now, el("b", { text: bar(at) }));
    const i = at === null ? 0 : at;
    frame.hit.setAttribute("aria-valuenow", String(i));
    frame.hit.setAttribute("aria-valuetext", bar(i));
  }
  function draw(canvas) {
    const { pen, width, height } = chartSurface(canvas);
    const same = edges[0] === edges[edges.length - 1];
    const xs = same ? [edges[0] - 0.5, edges[0] + 0.5] : [edges[0], edges[edges.length - 1]];
    const most = Math.max(1, ...counts);
    area = chartArea(width, height, xs, [0, most * 1.06]);
    const ticks = same ? [edges[0]] : chartTicks(xs[0], xs[1], Math.max(2, Math.floor(area.width / 52)));
    chartAxes(pen, area, ticks, [0, most * 1.06], options.axis || compact, compact);
    const cut = (e, i) => (same ? [area.x(edges[0] - 0.2), area.x(edges[0] + 0.2)] : [area.x(e[i]), area.x(e[i + 1])]);
    counts.forEach((n, i) => {
      if (!n) return;
      const [from, to] = cut(edges, i);
      const y = Math.min(area.y(n), area.bottom - 1.5);
      pen.fillStyle = i === at ? themeColor("--text") : themeColor("--accent");
      pen.globalAlpha = i === at ? 1 : 0.8;
      pen.fillRect(from + 0.5, y, Math.max(1, to - from - 1), area.bottom - y);
    });
    pen.globalAlpha = 1;
    if (options.before && !same) {
      const was = options.before;
      const size = was.counts.reduce((a, b) => a + b, 0) || 1;
      pen.strokeStyle = themeColor("--muted");
      pen.setLineDash([3, 2]);
      pen.beginPath();
      was.counts.forEach((n, i) => {
        const y = area.y((n / size) * total);
        pen.lineTo(area.x(was.edges[i]), y);
        pen.lineTo(area.x(was.edges[i + 1]), y);
      });
      pen.stroke();
      pen.setLineDash([]);
    }
  }
  function move(i) {
    at = i === null ? null : Math.min(counts.length - 1, Math.max(0, i));
    say();
    frame.redraw();
  }
  function barAt(event) {
    const x = area ? area.backX(event.clientX - frame.hit.getBoundingClientRect().left) : edges[0];
    for (let i = 0; i < counts.length; i += 1) if (x < edges[i + 1]) return i;
    return counts.length - 1;
  }
  const pick = (i) => options.onPick && counts[i] && options.onPick(edges[i], edges[i + 1], i === counts.length - 1);
  frame.hit.setAttribute("aria-valuemax", String(Math.max(0, counts.length - 1)));
  frame.hit.addEventListener("pointermove", (event) => move(barAt(event)));
  frame.hit.addEventListener("pointerleave", () => move(null));
  frame.hit.addEventListener("blur", () => move(null));
  frame.hit.addEventListener("click", (event) => pick(barAt(event)));
  frame.hit.addEventListener("keydown", (event) => {
    const here = at === null ? -1 : at;
    const moves = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: counts.length - 1 };
    if (event.key in moves) move(moves[event.key]);
    else if (event.key === "Enter" && at !== null) pick(at);
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  frame.canvas.setAttribute("aria-label", options.title + ", histogram of " + count(total));
  frame.rows = () => plainTable(["from", "to", "samples"], counts.map((n, i) => [format(edges[i]), format(edges[i + 1]), count(n)]));
  say();
  if (options.table) frame.flip(true, false);
  return { root: frame.root, destroy: frame.destroy };
}

// ---- scatter

/**
 * Points. options: {title, help, points: [[x, y, mark (bool), payload]], format: [x, y], words(point), onPick(payload), markWords, table, onTable}.
 */
export function scatter(options) {
  const points = [...options.points].sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  const [formatX, formatY] = options.format || [number, number];
  let at = null;
  let area = null;
  const frame = chartFrame({ ...options, hint: "arrow keys move between points, Enter opens a sample" }, draw);
  const words = (p) => options.words ? options.words(p) : formatX(p[0]) + ", " + formatY(p[1]);

  function say() {
    if (at === null) empty(frame.now, options.markWords || "");
    else empty(frame.now, el("b", { text: words(points[at]) }));
    if (points.length) {
      frame.hit.setAttribute("aria-valuenow", String(at === null ? 0 : at));
      frame.hit.setAttribute("aria-valuetext", words(points[at === null ? 0 : at]));
    }
  }
  function shape(pen, p, size) {
    const x = area.x(p[0]);
    const y = area.y(p[1]);
    pen.beginPath();
    if (p[2]) {
      pen.moveTo(x - size, y - size);
      pen.lineTo(x + size, y + size);
      pen.moveTo(x + size, y - size);
      pen.lineTo(x - size, y + size);
      pen.stroke();
    } else {
      pen.arc(x, y, size, 0, 7);
      pen.fill();
    }
  }
  function draw(canvas) {
    const { pen, width, height } = chartSurface(canvas);
    const ys = chartRange(points.map((p) => p[1]), false);
    const xs = chartRange(points.map((p) => p[0]), true);
    area = chartArea(width, height, xs, ys);
    chartAxes(pen, area, chartTicks(xs[0], xs[1], Math.max(2, Math.floor(area.width / 60))), ys, compact, compact);
    pen.lineWidth = 1.5;
    pen.globalAlpha = points.length > 400 ? 0.45 : 0.65;
    pen.fillStyle = themeColor("--accent");
    pen.strokeStyle = themeColor("--bad");
    for (const p of points) shape(pen, p, p[2] ? 3 : 2.5);
    pen.globalAlpha = 1;
    if (at !== null) {
      const p = points[at];
      pen.strokeStyle = themeColor("--text");
      pen.lineWidth = 2;
      pen.beginPath();
      pen.arc(area.x(p[0]), area.y(p[1]), 6, 0, 7);
      pen.stroke();
    }
  }
  function move(i) {
    at = i === null || !points.length ? null : Math.min(points.length - 1, Math.max(0, i));
    frame.hit.style.setProperty("cursor", at === null ? "crosshair" : "pointer");
    say();
    frame.redraw();
  }
  function find(event) {
    if (!area) return null;
    const box = frame.hit.getBoundingClientRect();
    let best = null;
    let far = 14 * 14;
    points.forEach((p, i) => {
      const d = (area.x(p[0]) - event.clientX + box.left) ** 2 + (area.y(p[1]) - event.clientY + box.top) ** 2;
      if (d < far) {
        far = d;
        best = i;
      }
    });
    return best;
  }
  frame.hit.setAttribute("aria-valuemax", String(Math.max(0, points.length - 1)));
  frame.hit.addEventListener("pointermove", (event) => move(find(event)));
  frame.hit.addEventListener("pointerleave", () => move(null));
  frame.hit.addEventListener("blur", () => move(null));
  frame.hit.addEventListener("click", (event) => {
    const i = find(event);
    if (i !== null && options.onPick) options.onPick(points[i][3]);
  });
  frame.hit.addEventListener("keydown", (event) => {
    const here = at === null ? -1 : at;
    const moves = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: points.length - 1 };
    if (event.key in moves) move(moves[event.key]);
    else if (event.key === "Enter" && at !== null && options.onPick) options.onPick(points[at][3]);
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  frame.canvas.setAttribute("aria-label", options.title + ", " + count(points.length) + " points");
  frame.rows = () => plainTable(options.heads || ["x", "y"], points.slice(0, chartMaxRows).map((p) => [formatX(p[0]), formatY(p[1]), p[2] ? "✕" : ""]));
  say();
  if (options.table) frame.flip(true, false);
  return { root: frame.root, destroy: frame.destroy };
}

// ---- sparkline

/** A small curve of numbers (nulls are gaps), drawn again by redraw(values). */
export function sparkline(values) {
  const canvas = el("canvas", { aria: { hidden: "true" } });
  let numbers = values;
  let frameRequest = 0;
  function draw() {
    frameRequest = 0;
    if (!canvas.isConnected) return;
    const { pen, width, height } = chartSurface(canvas);
    const recent = numbers.length > width ? numbers.slice(-Math.round(width)) : numbers;
    const [low, high] = chartRange(recent, true);
    const place = (v, i) => [recent.length < 2 ? width / 2 : 1 + (i / (recent.length - 1)) * (width - 4), height - 2 - ((v - low) / (high - low || 1)) * (height - 4)];
    pen.strokeStyle = themeColor("--muted");
    pen.lineWidth = 1.25;
    pen.beginPath();
    let down = false;
    let last = null;
    recent.forEach((v, i) => {
      if (v === null || v === undefined) {
        down = false;
        return;
      }
      const [x, y] = place(v, i);
      pen[down ? "lineTo" : "moveTo"](x, y);
      down = true;
      last = [x, y];
    });
    pen.stroke();
    if (last) {
      pen.fillStyle = themeColor("--accent");
      pen.beginPath();
      pen.arc(last[0], last[1], 2, 0, 7);
      pen.fill();
    }
  }
  const ask = () => {
    if (!frameRequest) frameRequest = requestAnimationFrame(draw);
  };
  const watch = new ResizeObserver(ask);
  watch.observe(canvas);
  document.addEventListener("themechange", ask);
  return {
    canvas,
    redraw(next) {
      numbers = next;
      ask();
    },
    destroy() {
      watch.disconnect();
      document.removeEventListener("themechange", ask);
    },
  };
}
