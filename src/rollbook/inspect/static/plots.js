// plots.js: small drawings of lines, areas and dots in SVG, whose marks can be pointed at.
// Invariant: a drawing is made anew for the width it has; its colors are classes, so that a theme changes them without a word from here.

import { el, empty, icon, svg } from "./dom.js";

const plotMargin = { left: 44, right: 12, top: 10, bottom: 22 };

/** Round numbers between two, about `most` of them. */
export function plotTicks(low, high, most) {
  const rough = (high - low || 1) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((k) => k * power).find((s) => s >= rough * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) ticks.push(i * step || 0); // never -0
  return ticks;
}

/**
 * A drawing that follows its width. options: {height, label, draw(area) -> nodes, xs: [low, high], ys: [low, high], formatX, formatY, whole (x is a whole number)}.
 * area: {x(v), y(v), left, right, top, bottom, back(pixel) -> x}. Returns {root, area(), redraw(), destroy()}.
 */
export function plotFrame(options) {
  const root = el("div", { class: "plot", style: { height: options.height + "px" } });
  let area = null;
  function redraw() {
    const width = Math.round(root.clientWidth);
    if (!width) return;
    const { left, top } = plotMargin;
    const right = width - plotMargin.right;
    const bottom = options.height - plotMargin.bottom;
    const [x0, x1] = options.xs;
    const [y0, y1] = options.ys;
    area = {
      left, right, top, bottom,
      x: (v) => (x1 === x0 ? (left + right) / 2 : left + ((v - x0) / (x1 - x0)) * (right - left)),
      y: (v) => bottom - ((v - y0) / (y1 - y0 || 1)) * (bottom - top),
      back: (pixel) => x0 + ((pixel - left) / (right - left || 1)) * (x1 - x0),
    };
    const ticksX = x1 === x0 ? [x0] : plotTicks(x0, x1, Math.max(2, Math.floor((right - left) / 64))).filter((t) => !options.whole || Number.isInteger(t));
    const ticksY = plotTicks(y0, y1, Math.max(2, Math.floor((bottom - top) / 36)));
    empty(root, svg("svg", { class: "plot-svg", width: String(width), height: String(options.height), role: "img", aria: { label: options.label } },
      ticksY.map((t) => [svg("line", { class: "plot-rule", x1: left, x2: right, y1: area.y(t), y2: area.y(t) }), svg("text", { class: "plot-tick plot-tick-y", x: left - 6, y: area.y(t) + 4 }, options.formatY(t))]),
      ticksX.map((t) => svg("text", { class: "plot-tick plot-tick-x", x: area.x(t), y: options.height - 6 }, options.formatX(t))),
      options.draw(area)));
  }
  const watch = new ResizeObserver(redraw);
  watch.observe(root);
  return { root, redraw, area: () => area, destroy: () => watch.disconnect() };
}

/** The path of a line through points [x, y] in pixels. */
export function plotPath(points) {
  return points.map(([x, y], i) => (i ? "L" : "M") + x.toFixed(1) + " " + y.toFixed(1)).join("");
}

/** A figure around a drawing: its title, a line of words that follow the pointer, and the button that turns it into a table. */
export function plotFigure(options) {
  const now = el("span", { class: "chart-now" });
  const table = el("div", { class: "chart-table", tabindex: "0", role: "region", aria: { label: options.title + ", as a table" }, hidden: true });
  const toggle = el("button", { class: "icon-button small", type: "button", title: "Show as a table", aria: { label: options.title + ": table", pressed: "false" }, on: { click: () => {
    const on = table.hidden;
    table.hidden = !on;
    options.plot.hidden = on;
    toggle.setAttribute("aria-pressed", String(on));
    if (on) empty(table, options.rows());
  } } }, icon("table"));
  const root = el("figure", { class: "panel chart", aria: { label: options.title } },
    el("div", { class: "chart-head" }, el("h2", { text: options.title, title: options.help || null }), now, toggle),
    options.plot, table, options.note || null);
  return { root, now };
}
