// Strips: a whole sample in one line of pixels, to see where it is hot and to go there; and the curve of a lens over positions.
// Invariant: a pixel stands for the tokens from x * tokens per pixel on, and the strongest of them is always seen.

import { el, count, number, themeColor } from "./dom.js";
import { MASK_BIT } from "./frame.js";
import { LENS_NONE, lensCodes, lensColor, lensRank, lensValues } from "./lenses.js";
import { versionChanges } from "./tokens.js";

const STRIP_FRAME = 3; // pixels of the band above the heat: who speaks, and where turns begin

let stripColors = null; // {seq: [16], div: [16], ...} of the theme in force

export function stripTheme() {
  if (stripColors !== null) return stripColors;
  const row = (name) => Array.from({ length: 16 }, (_, i) => themeColor(`--${name}-${i}`));
  stripColors = {
    sequential: row("seq"), diverging: row("div"), panel: themeColor("--panel"), raised: themeColor("--raised"), line: themeColor("--line"),
    edge: themeColor("--edge"), text: themeColor("--text"), muted: themeColor("--muted"), accent: themeColor("--accent"), warn: themeColor("--warn"),
  };
  return stripColors;
}
document.addEventListener("themechange", () => {
  stripColors = null;
});

// The size comes from the observer, which knows it: asking the canvas would lay the page out once for every strip.
function stripSize(canvas, room) {
  const ratio = Math.min(3, window.devicePixelRatio || 1);
  const width = Math.max(1, Math.round(room.width * ratio));
  const height = Math.max(1, Math.round(room.height * ratio));
  if (canvas.width !== width) canvas.width = width;
  if (canvas.height !== height) canvas.height = height;
  return { width, height, ratio };
}

// Runs of one segment's look over [from, to): turns, tools and masked stretches, as drawn above the heat.
function stripBands(trajectory, from, to) {
  const bands = [];
  for (const segment of trajectory.segments) {
    if (segment.stop <= from || segment.start >= to) continue;
    bands.push({ start: Math.max(segment.start, from), stop: Math.min(segment.stop, to), kind: segment.role === "tool" ? "tool" : segment.kind, turn: segment.turn, role: segment.role });
  }
  return bands;
}

// The color numbers of each pixel: of its strongest token, and of the mean over its tokens; LENS_NONE where none has a value.
function stripPooled(codes, diverging, from, total, per, reach) {
  const strong = new Uint8Array(reach).fill(LENS_NONE);
  const mean = new Uint8Array(reach).fill(LENS_NONE);
  for (let x = 0; x < reach; x += 1) {
    const first = from + Math.floor(x * per);
    const last = Math.min(total, Math.max(first + 1, from + Math.floor((x + 1) * per)));
    let rank = -1;
    let sum = 0;
    let n = 0;
    for (let i = first; i < last; i += 1) {
      if (codes[i] === LENS_NONE) continue;
      const tokenRank = lensRank(codes[i], diverging);
      const color = lensColor(codes[i]);
      sum += color;
      n += 1;
      if (tokenRank > rank) {
        rank = tokenRank;
        strong[x] = color;
      }
    }
    if (n > 0) mean[x] = Math.round(sum / n);
  }
  return { strong, mean };
}

// Has a drawing painted anew when its canvas gets room, and when the theme changes; `resized` and `themed` end that.
function stripWatch(drawing) {
  drawing.room = null; // {width, height} once it is on the page
  drawing.resized = new ResizeObserver((entries) => {
    drawing.room = entries[entries.length - 1].contentRect;
    drawing.paint();
  });
  drawing.resized.observe(drawing.canvas);
  drawing.themed = () => drawing.paint();
  document.addEventListener("themechange", drawing.themed);
}

/**
 * A minimap and scrubber. options: {trajectory, from (first token), length (tokens the full width stands for), fork (token
 * of the first divergence or -1), label, onSeek(token, settled)}. draw(lens, scale) paints; view(first, last) moves the box.
 */
export class TokenStrip {
  constructor(options) {
    this.options = options;
    this.lens = null;
    this.scale = null;
    this.canvas = el("canvas", { class: "strip-canvas", "aria-hidden": "true" });
    this.box = el("div", { class: "strip-box" });
    this.at = el("div", { class: "strip-at" });
    this.element = el("div", {
      class: "strip", role: "slider", tabindex: "0", "aria-label": options.label ?? "where in the sample",
      "aria-valuemin": String(options.from), "aria-valuemax": String(options.trajectory.ends.length), "aria-valuenow": String(options.from),
    }, this.canvas, this.box, this.at);
    stripWatch(this);
    this.listen();
  }

  listen() {
    const { element } = this;
    const seek = (event, settled) => {
      const box = this.canvas.getBoundingClientRect();
      const token = this.tokenAtX(event.clientX - box.left);
      this.options.onSeek(Math.max(this.options.from, Math.min(this.options.trajectory.ends.length - 1, token)), settled);
    };
    element.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      element.setPointerCapture(event.pointerId);
      this.dragging = true;
      event.preventDefault();
      element.focus({ preventScroll: true });
      seek(event, false);
    });
    element.addEventListener("pointermove", (event) => {
      if (this.dragging) seek(event, false);
    });
    element.addEventListener("pointerup", (event) => {
      if (this.dragging) seek(event, true);
      this.dragging = false;
    });
    element.addEventListener("pointercancel", () => {
      this.dragging = false;
    });
    element.addEventListener("keydown", (event) => {
      const steps = { ArrowLeft: -0.02, ArrowRight: 0.02, PageUp: -0.1, PageDown: 0.1 };
      const total = this.options.trajectory.ends.length;
      let target = null;
      if (event.key in steps) target = (this.first ?? this.options.from) + steps[event.key] * (total - this.options.from);
      if (event.key === "Home") target = this.options.from;
      if (event.key === "End") target = total - 1;
      if (target === null) return;
      event.preventDefault();
      event.stopPropagation();
      this.options.onSeek(Math.max(this.options.from, Math.min(total - 1, Math.round(target))), true);
    });
  }

  tokenAtX(x) {
    return Math.floor(this.options.from + (x / Math.max(1, this.canvas.clientWidth)) * this.options.length);
  }

  draw(lens, scale) {
    this.lens = lens;
    this.scale = scale;
    this.paint();
  }

  paint() {
    if (this.room === null || this.room.width === 0) return;
    const { trajectory, from, length, fork } = this.options;
    const colors = stripTheme();
    const { width, height, ratio } = stripSize(this.canvas, this.room);
    const pen = this.canvas.getContext("2d");
    pen.clearRect(0, 0, width, height);
    const total = trajectory.ends.length;
    const per = length / width;
    const top = Math.round(STRIP_FRAME * ratio);
    const reach = Math.min(width, Math.ceil((total - from) / per));
    pen.fillStyle = colors.raised;
    pen.fillRect(0, top, reach, height - top);
    const codes = this.lens === null ? null : lensCodes(trajectory, this.lens, this.scale);
    if (codes !== null) {
      // Where a pixel stands for several tokens, the upper part shows the strongest of them and the lower their mean.
      const room = height - top;
      const split = per > 1.5 ? Math.round(room * 0.4) : room;
      const { strong, mean } = stripPooled(codes, this.scale.kind === "diverging", from, total, per, reach);
      const rows = split === room ? [[strong, top, room]] : [[strong, top, split], [mean, top + split, room - split]];
      for (const [pooled, y, tall] of rows) {
        let start = 0;
        for (let x = 1; x <= reach; x += 1) {
          if (x < reach && pooled[x] === pooled[start]) continue;
          if (pooled[start] !== LENS_NONE) {
            pen.fillStyle = colors[this.scale.kind][pooled[start]];
            pen.fillRect(start, y, x - start, tall);
          }
          start = x;
        }
      }
    }
    // Masked stretches: a hatch, which is no color.
    pen.strokeStyle = colors.muted;
    pen.globalAlpha = 0.5;
    pen.lineWidth = ratio;
    let begin = -1;
    for (let i = from; i <= total; i += 1) {
      const masked = i < total && !(trajectory.flags[i] & MASK_BIT);
      if (masked && begin < 0) begin = i;
      if (!masked && begin >= 0) {
        const x0 = (begin - from) / per;
        const x1 = (i - from) / per;
        if (x1 - x0 >= 2 * ratio) {
          pen.save();
          pen.beginPath();
          pen.rect(x0, top, x1 - x0, height - top);
          pen.clip();
          pen.beginPath();
          for (let x = x0 - height; x < x1; x += 4 * ratio) {
            pen.moveTo(x, height);
            pen.lineTo(x + height, 0);
          }
          pen.stroke();
          pen.restore();
        }
        begin = -1;
      }
    }
    pen.globalAlpha = 1;
    // Who speaks: think faint, tools strong; a notch where a turn begins; a line where the policy changed.
    let turn = null;
    for (const band of stripBands(trajectory, from, total)) {
      const x0 = (band.start - from) / per;
      const x1 = (band.stop - from) / per;
      pen.fillStyle = band.kind === "tool" || band.kind === "tool_call" ? colors.warn : band.kind === "think" ? colors.edge : band.role === "assistant" ? colors.muted : colors.line;
      pen.fillRect(x0, 0, Math.max(1, x1 - x0), top - ratio);
      if (turn !== null && band.role === "assistant" && band.turn !== turn) {
        pen.fillStyle = colors.text;
        pen.fillRect(x0, 0, ratio, height);
      }
      if (band.role === "assistant") turn = band.turn;
    }
    pen.fillStyle = colors.accent;
    for (const token of versionChanges(trajectory)) {
      if (token >= from) pen.fillRect((token - from) / per, 0, Math.max(1, 1.5 * ratio), height);
    }
    if (fork !== undefined && fork >= from) {
      const x = (fork - from) / per;
      pen.fillStyle = colors.text;
      for (let y = 0; y < height; y += 4 * ratio) pen.fillRect(x - ratio / 2, y, 1.5 * ratio, 2 * ratio);
    }
  }

  // Where the box of what is seen stands; null hides it.
  view(first, last) {
    const { from, length } = this.options;
    if (first === null) {
      this.box.style.setProperty("display", "none");
      return;
    }
    this.first = first;
    this.box.style.setProperty("display", "block");
    this.box.style.setProperty("left", `${(100 * (first - from)) / length}%`);
    this.box.style.setProperty("width", `${Math.max(0.4, (100 * (last - first)) / length)}%`);
    this.element.setAttribute("aria-valuenow", String(Math.round(first)));
    this.element.setAttribute("aria-valuetext", `tokens ${count(Math.floor(first))} to ${count(Math.ceil(last))} are shown`);
  }

  mark(token) {
    const { from, length } = this.options;
    this.at.style.setProperty("display", token === null ? "none" : "block");
    if (token !== null) this.at.style.setProperty("left", `${(100 * (token + 0.5 - from)) / length}%`);
  }

  close() {
    this.resized.disconnect();
    document.removeEventListener("themechange", this.themed);
  }
}

/**
 * The lens against position: band from lowest to highest and the mean, a pixel at a time; drag to zoom, double click or the
 * button for all of it, click to go there. options: {trajectory, range ([from, to] or null), onSeek(token), onRange(range or null)}.
 */
export class TokenCurve {
  constructor(options) {
    this.options = options;
    this.range = options.range ?? [0, options.trajectory.ends.length];
    this.lens = null;
    this.canvas = el("canvas", { class: "curve-canvas", "aria-hidden": "true" });
    this.brush = el("div", { class: "curve-brush" });
    this.at = el("div", { class: "strip-at" });
    this.note = el("div", { class: "curve-note" });
    this.whole = el("button", { class: "curve-whole", type: "button", text: "whole sample", on: { click: () => this.zoom(null) } });
    this.element = el("div", { class: "curve", role: "img", "aria-label": "lens values by token position" }, this.canvas, this.brush, this.at, this.note, this.whole);
    stripWatch(this);
    this.listen();
  }

  tokenAtX(x) {
    const [from, to] = this.range;
    const share = Math.max(0, Math.min(1, x / Math.max(1, this.canvas.clientWidth)));
    return Math.min(to - 1, Math.floor(from + share * (to - from)));
  }

  listen() {
    let start = null;
    const place = (event) => event.clientX - this.canvas.getBoundingClientRect().left;
    this.canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      start = place(event);
      this.canvas.setPointerCapture(event.pointerId);
      event.preventDefault();
    });
    this.canvas.addEventListener("pointermove", (event) => {
      const x = place(event);
      this.hover(this.tokenAtX(x));
      if (start !== null && Math.abs(x - start) > 4) {
        const left = Math.max(0, Math.min(x, start));
        this.brush.style.setProperty("display", "block");
        this.brush.style.setProperty("left", `${left}px`);
        this.brush.style.setProperty("width", `${Math.min(this.canvas.clientWidth, Math.max(x, start)) - left}px`);
      }
    });
    this.canvas.addEventListener("pointerup", (event) => {
      if (start === null) return;
      const x = place(event);
      const from = this.tokenAtX(Math.min(x, start));
      const to = this.tokenAtX(Math.max(x, start)) + 1;
      const dragged = Math.abs(x - start) > 4;
      start = null;
      this.brush.style.setProperty("display", "none");
      if (dragged && to - from > 3) this.zoom([from, to]);
      else if (!dragged) this.options.onSeek(this.tokenAtX(x));
    });
    this.canvas.addEventListener("pointerleave", () => {
      this.note.textContent = this.said ?? "";
    });
    this.canvas.addEventListener("dblclick", () => this.zoom(null));
  }

  hover(token) {
    if (this.lens === null) return;
    const values = lensValues(this.options.trajectory, this.lens);
    const value = values === null ? NaN : values[token];
    this.note.textContent = `#${count(token)} ${this.lens.label} ${Number.isFinite(value) ? number(value) : "no value"}`;
  }

  zoom(range) {
    this.range = range ?? [0, this.options.trajectory.ends.length];
    this.options.onRange(range);
    this.paint();
  }

  draw(lens, scale) {
    this.lens = lens;
    this.scale = scale;
    this.paint();
  }

  mark(token) {
    this.marked = token;
    const [from, to] = this.range;
    const inside = token !== null && token >= from && token < to;
    this.at.style.setProperty("display", inside ? "block" : "none");
    if (inside) this.at.style.setProperty("left", `${(100 * (token + 0.5 - from)) / (to - from)}%`);
  }

  paint() {
    if (this.room === null || this.room.width === 0) return;
    const { trajectory } = this.options;
    const [from, to] = this.range;
    const colors = stripTheme();
    const { width, height, ratio } = stripSize(this.canvas, this.room);
    const pen = this.canvas.getContext("2d");
    pen.clearRect(0, 0, width, height);
    this.whole.hidden = from === 0 && to === trajectory.ends.length;
    const per = (to - from) / width;
    pen.fillStyle = colors.raised;
    let begin = -1;
    for (let i = from; i <= to; i += 1) {
      const masked = i < to && !(trajectory.flags[i] & MASK_BIT);
      if (masked && begin < 0) begin = i;
      if (!masked && begin >= 0) {
        pen.fillRect((begin - from) / per, 0, (i - begin) / per, height);
        begin = -1;
      }
    }
    let turn = null;
    for (const band of stripBands(trajectory, from, to)) {
      if (turn !== null && band.role === "assistant" && band.turn !== turn) {
        pen.fillStyle = colors.edge;
        pen.fillRect((band.start - from) / per, 0, ratio, height);
      }
      if (band.role === "assistant") turn = band.turn;
    }
    this.said = from === 0 && to === trajectory.ends.length ? "" : `tokens ${count(from)}–${count(to - 1)}`;
    this.note.textContent = this.said;
    this.mark(this.marked ?? null);
    const values = this.lens === null ? null : lensValues(trajectory, this.lens);
    if (values === null) return;
    let low = Infinity;
    let high = -Infinity;
    for (let i = from; i < to; i += 1) {
      if (!Number.isFinite(values[i])) continue;
      if (values[i] < low) low = values[i];
      if (values[i] > high) high = values[i];
    }
    if (!(high >= low)) return;
    if (this.scale.kind === "sequential" && low > 0) low = 0;
    if (high === low) high = low + 1;
    const pad = 3 * ratio;
    const y = (value) => height - pad - ((value - low) / (high - low)) * (height - 2 * pad);
    const means = [];
    pen.fillStyle = colors.accent;
    pen.globalAlpha = 0.3;
    for (let x = 0; x < width; x += 1) {
      const first = from + Math.floor(x * per);
      const last = Math.min(to, Math.max(first + 1, from + Math.floor((x + 1) * per)));
      let least = Infinity;
      let most = -Infinity;
      let sum = 0;
      let n = 0;
      for (let i = first; i < last; i += 1) {
        const value = values[i];
        if (!Number.isFinite(value)) continue;
        if (value < least) least = value;
        if (value > most) most = value;
        sum += value;
        n += 1;
      }
      means.push(n === 0 ? null : sum / n);
      if (n > 1) pen.fillRect(x, y(most), 1, Math.max(1, y(least) - y(most)));
    }
    pen.globalAlpha = 1;
    pen.strokeStyle = colors.accent;
    pen.lineWidth = 1.2 * ratio;
    pen.lineJoin = "round";
    pen.beginPath();
    let open = false;
    means.forEach((mean, x) => {
      if (mean === null) open = false;
      else if (open) pen.lineTo(x + 0.5, y(mean));
      else {
        pen.moveTo(x + 0.5, y(mean));
        open = true;
      }
    });
    pen.stroke();
    pen.fillStyle = colors.muted;
    pen.font = `${10 * ratio}px system-ui, sans-serif`;
    pen.textBaseline = "top";
    pen.fillText(number(high), 3 * ratio, 2 * ratio);
    pen.textBaseline = "bottom";
    pen.fillText(number(low), 3 * ratio, height - 1 * ratio);
    this.element.setAttribute("aria-label", `${this.lens.label} over tokens ${count(from)} to ${count(to - 1)}: from ${number(low)} to ${number(high)}`);
  }

  close() {
    this.resized.disconnect();
    document.removeEventListener("themechange", this.themed);
  }
}
