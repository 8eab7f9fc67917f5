// A pane with the tokens of one trajectory: plain text first, colored when visible; one listener for all tokens.
// Invariant: the text in a chunk is the display form of its tokens in order, so a place in it is always a token, whatever
// is escaped, shortened or hidden.

import { el, empty, count, plural, visible } from "./dom.js";
import { MASK_BIT, SPECIAL_BIT } from "./frame.js";
import { LENS_NONE, LENS_OVER, LENS_UNDER, lensCodes, lensRank } from "./lenses.js";

const TOKENS_CHUNK = 256; // a chunk is cut at the first newline after so many tokens
const TOKENS_CHUNK_MAX = 1024;
const TOKENS_PAGE = 200_000; // tokens shown at once
const TOKENS_MARGIN = "400px 0px";
const TOKENS_SCREEN = 700; // pixels that are colored before anything is seen
const TOKENS_ELEMENTS = 24_000; // elements a pane may hold before chunks out of sight go back to plain text
const TOKENS_FOLD_SYSTEM = 48; // a system prompt longer than this opens folded, other prompts from TOKENS_FOLD_PROMPT
const TOKENS_FOLD_PROMPT = 2500;
const TOKENS_REPEAT = 4; // so many equal special tokens in a row are one mark with a count
const TOKENS_LINE = 18; // pixels, as in tokens.css
const TOKENS_SMALL = 64; // a picture of fewer points is drawn larger, about TOKENS_DRAWN pixels, and its size stands below it
const TOKENS_DRAWN = 96;

// Characters that reorder, hide or control, and the separators that break lines unseen.
const TOKENS_HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u115f\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|\udb40[\udc00-\udc7f]/;
const TOKENS_HIDDEN_ALL = new RegExp(TOKENS_HIDDEN.source, "g");

const TOKENS_SPECIAL = 1 << 8; // bits of a token's look, beside its color code
const TOKENS_MASKED = 1 << 9;
const TOKENS_VERSION = 1 << 10;
const TOKENS_EVEN = 1 << 11;
const TOKENS_AT = 1 << 12;
const TOKENS_DIVERGING = 1 << 13;
const TOKENS_FORK = 1 << 14;

const tokensClasses = new Map(); // look -> class names, all of them fixed words

function tokensClass(look) {
  let words = tokensClasses.get(look);
  if (words !== undefined) return words;
  const code = look & 63;
  const letter = look & TOKENS_DIVERGING ? "d" : "s";
  const list = [];
  if (code !== LENS_NONE) {
    if (code === LENS_OVER) list.push(`tq-${letter}15 tq-far`);
    else if (code === LENS_UNDER) list.push(`tq-${letter}0 tq-far`);
    else list.push(`tq-${letter}${code}`);
    if (code === 15 || (code === 0 && letter === "d")) list.push("tq-end");
  }
  if (look & TOKENS_SPECIAL) list.push("tk-special");
  if (look & TOKENS_MASKED) list.push("tk-masked");
  if (look & TOKENS_VERSION) list.push("tk-version");
  if (look & TOKENS_EVEN) list.push("tk-even");
  if (look & TOKENS_AT) list.push("tk-at");
  if (look & TOKENS_FORK) list.push("tk-fork");
  words = list.join(" ");
  tokensClasses.set(look, words);
  return words;
}

function tokensEscape(text) {
  return text.replace(TOKENS_HIDDEN_ALL, (c) => `⟦U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟧`);
}

// "<|im_end|>" as a small mark: ‹im_end›.
function tokensMark(text) {
  const bare = text.replace(/^[<[(|{\s]+|[\s>\])|}]+$/g, "");
  return `‹${tokensEscape(bare === "" ? text : bare).slice(0, 24)}›`;
}

export function tokenStart(trajectory, index) {
  return index === 0 ? 0 : trajectory.ends[index - 1];
}

export function tokenText(trajectory, index) {
  return trajectory.text.slice(tokenStart(trajectory, index), trajectory.ends[index]);
}

// The token's own text; for one of zero width, that of the token which completes its character.
export function tokenShown(trajectory, index) {
  let at = index;
  while (at < trajectory.ends.length - 1 && trajectory.ends[at] === tokenStart(trajectory, at)) at += 1;
  return tokenText(trajectory, at);
}

const tokensTemplates = new WeakMap();

// Which tokens are a chat template's own words: the role and the newline after an opening mark ("<|im_start|>assistant\n").
function tokensTemplate(trajectory) {
  let isTemplate = tokensTemplates.get(trajectory);
  if (isTemplate !== undefined) return isTemplate;
  const { text, ends, flags } = trajectory;
  isTemplate = new Uint8Array(ends.length);
  for (let i = 0; i + 1 < ends.length; i += 1) {
    if (!(flags[i] & SPECIAL_BIT) || flags[i + 1] & SPECIAL_BIT) continue;
    const words = /^(?:system|developer|user|assistant|tool|ipython|model)\n+/.exec(text.slice(ends[i], ends[i] + 16));
    if (words === null) continue;
    for (let j = i + 1; j < ends.length && ends[j] <= ends[i] + words[0].length && !(flags[j] & SPECIAL_BIT); j += 1) isTemplate[j] = 1;
  }
  tokensTemplates.set(trajectory, isTemplate);
  return isTemplate;
}

// The first i in [from, to) with ends[i] > offset.
function tokensFindEnd(ends, offset, from, to) {
  let low = from;
  let high = to;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ends[middle] > offset) high = middle;
    else low = middle + 1;
  }
  return low;
}

// Display text of tokens [start, stop) and, where it differs from the data, the display end of each token.
function tokensLayout(trajectory, start, stop, raw) {
  const { text, ends, flags, ids } = trajectory;
  const base = tokenStart(trajectory, start);
  const slice = text.slice(base, ends[stop - 1]);
  let plain = !TOKENS_HIDDEN.test(slice) && !(raw && slice.includes("\n"));
  for (let i = start; plain && i < stop; i += 1) if (flags[i] & SPECIAL_BIT) plain = raw;
  if (plain) return { text: slice, ends: null, base };
  const shown = new Uint32Array(stop - start);
  const parts = [];
  let length = 0;
  let last = base;
  let repeat = 0; // tokens still to be swallowed by the mark before them
  for (let i = start; i < stop; i += 1) {
    const piece = text.slice(last, ends[i]);
    last = ends[i];
    let part;
    if (repeat > 0) {
      part = "";
      repeat -= 1;
    } else if (!raw && flags[i] & SPECIAL_BIT) {
      part = tokensMark(piece);
      if (ids !== null) {
        let same = i + 1;
        while (same < stop && ids[same] === ids[i]) same += 1;
        if (same - i >= TOKENS_REPEAT) {
          part += `×${same - i} `;
          repeat = same - i - 1;
        }
      }
    } else {
      part = TOKENS_HIDDEN.test(piece) ? tokensEscape(piece) : piece;
      if (raw) part = part.replaceAll("\n", "↵\n");
    }
    length += part.length;
    parts.push(part);
    shown[i - start] = length;
  }
  return { text: parts.join(""), ends: shown, base };
}

// Cuts [start, stop) into chunks at newline tokens; `stops` are places where a chunk must end.
function tokensCuts(trajectory, start, stop, stops) {
  const { text, ends, flags, ids } = trajectory;
  const cuts = [];
  let from = start;
  for (let i = start; i < stop; i += 1) {
    const size = i + 1 - from;
    const newline = ends[i] > 0 && text.charCodeAt(ends[i] - 1) === 10;
    const repeats = ids !== null && flags[i] & SPECIAL_BIT && i + 1 < stop && ids[i + 1] === ids[i];
    // Zero-width tokens stay with the character they are part of, and a run of equal marks stays whole.
    const inside = (i + 1 < stop && ends[i + 1] === ends[i]) || repeats;
    if (stops.has(i + 1) || (size >= TOKENS_CHUNK && newline) || (size >= TOKENS_CHUNK_MAX && !inside) || i + 1 === stop) {
      cuts.push([from, i + 1, newline || i + 1 === stop || stops.has(i + 1)]);
      from = i + 1;
    }
  }
  return cuts;
}

function tokensHighlight(name, priority) {
  if (typeof Highlight === "undefined" || !CSS.highlights) return null;
  if (!CSS.highlights.has(name)) {
    const highlight = new Highlight();
    highlight.priority = priority;
    CSS.highlights.set(name, highlight);
  }
  return CSS.highlights.get(name);
}

const TOKENS_ROLES = new Set(["system", "user", "assistant", "tool", "text"]);
const TOKENS_KINDS = new Set(["text", "think", "tool_call", "tool_result", "image"]);
const TOKENS_KIND_WORDS = { think: "thinking", tool_call: "tool call", tool_result: "tool result", image: "image", text: "text" };

// The policy versions that sampled [start, stop): "v136", "v136→v137", or nothing.
export function segmentVersions(trajectory, start, stop) {
  if (trajectory.versions === null) return "";
  let low = Infinity;
  let high = -1;
  for (let i = start; i < stop; i += 1) {
    const version = trajectory.versions[i];
    if (version < 0) continue;
    if (version < low) low = version;
    if (version > high) high = version;
  }
  if (high < 0) return "";
  return low === high ? `v${low}` : `v${low}→v${high}`;
}

const tokensChanges = new WeakMap();

// The tokens at which another policy version went on than the one that sampled last; tokens that none sampled are passed over.
export function versionChanges(trajectory) {
  let changes = tokensChanges.get(trajectory);
  if (changes !== undefined) return changes;
  changes = new Set();
  let last = -1;
  (trajectory.versions ?? []).forEach((version, index) => {
    if (version < 0) return;
    if (last >= 0 && version !== last) changes.add(index);
    last = version;
  });
  tokensChanges.set(trajectory, changes);
  return changes;
}

// How much of [start, stop) is not trained on, 0 to 1.
export function maskedShare(trajectory, start, stop) {
  let masked = 0;
  for (let i = start; i < stop; i += 1) if (!(trajectory.flags[i] & MASK_BIT)) masked += 1;
  return stop > start ? masked / (stop - start) : 0;
}

/**
 * A pane. options: {trajectory, label, from and to (tokens shown; all), raw, lens and scale (null), mask ("dim", "hatch", "off"), folds (Set of
 * segment numbers whose fold differs from the usual), mediaUrl, onCursor(index), onHover(index or null), onScroll(pane),
 * onFold(folds), onPicture(picture), quiet (no role headers, where a response is one turn)}.
 */
export class TokenPane {
  constructor(options) {
    this.options = options;
    this.trajectory = options.trajectory;
    this.from = options.from ?? 0;
    this.to = options.to ?? options.trajectory.ends.length;
    this.raw = Boolean(options.raw);
    this.folds = new Set(options.folds ?? []);
    this.lens = options.lens ?? null;
    this.scale = this.lens === null ? null : options.scale;
    this.codes = this.lens === null ? null : lensCodes(this.trajectory, this.lens, this.scale);
    this.look = 0; // rises with every recoloring: a chunk painted under another number is stale
    this.cursor = -1;
    this.marks = [-1, -1]; // token range of search hits' current one
    this.fork = -1;
    this.hits = [];
    this.elements = 0;
    this.pages = this.cutPages();
    this.page = 0;
    this.chunks = [];
    this.shown = [];
    this.seen = new Set();
    this.ofElement = new WeakMap();
    this.ranges = new Map(); // highlight name -> ranges of this pane
    this.body = el("div", { class: "tk-body" });
    this.element = el("div", {
      class: "tk-pane", tabindex: "0", role: "region", "aria-label": options.label ?? "tokens", data: { mask: options.mask ?? "dim" },
    }, this.body);
    this.observer = new IntersectionObserver((entries) => this.observed(entries), { root: this.element, rootMargin: TOKENS_MARGIN });
    this.width = new ResizeObserver(() => this.scrolled());
    this.width.observe(this.element);
    this.listen();
    this.build();
  }

  // ---- what is shown

  cutPages() {
    const total = this.to;
    const pages = [];
    let from = this.from;
    while (total - from > TOKENS_PAGE) {
      // The last segment boundary in the second half of a page, else a hard cut.
      let to = from + TOKENS_PAGE;
      for (const segment of this.trajectory.segments) {
        if (segment.stop > from + TOKENS_PAGE / 2 && segment.stop <= from + TOKENS_PAGE) to = segment.stop;
      }
      pages.push([from, to]);
      from = to;
    }
    pages.push([from, total]);
    return pages;
  }

  foldedUsually(segment) {
    const length = segment.stop - segment.start;
    if (segment.role === "system") return length > TOKENS_FOLD_SYSTEM;
    if (segment.role === "assistant") return false;
    return length > TOKENS_FOLD_PROMPT;
  }

  folded(index) {
    return this.foldedUsually(this.trajectory.segments[index]) !== this.folds.has(index);
  }

  build() {
    const { trajectory, raw } = this;
    this.observer.disconnect();
    this.dropRanges();
    this.chunks = [];
    this.seen.clear();
    this.elements = 0;
    const [from, to] = this.pages[this.page];
    const width = this.element.clientWidth || this.options.width || 600;
    const line = Math.max(16, Math.floor((width - 24) / 7.25));
    const blocks = [];
    if (this.pages.length > 1) blocks.push(this.pager("top"));
    const pictures = (trajectory.pictures ?? []).map((picture, index) => ({ picture, index }));
    const placed = pictures.filter(({ picture }) => Number.isInteger(picture.token));
    const loose = pictures.filter(({ picture }) => !Number.isInteger(picture.token));
    const first = trajectory.segments.findIndex((segment) => segment.role === "user" && segment.stop > from);
    this.bodies = new Map(); // segment number -> {body, button}
    if (raw || trajectory.segments.length === 0) {
      const body = el("div", { class: "tk-text" });
      const here = placed.filter(({ picture }) => picture.token >= from && picture.token < to);
      this.pieces(body, from, to, line, from === 0 ? [...loose, ...here] : here, -1);
      blocks.push(el("div", { class: "tk-segment tk-raw" }, body));
    } else {
      let section = null;
      let role = null;
      let turn = null;
      trajectory.segments.forEach((segment, index) => {
        const start = Math.max(segment.start, from);
        const stop = Math.min(segment.stop, to);
        if (start >= stop) return;
        const fresh = section === null || segment.role !== role || (segment.turn !== turn && segment.role === "assistant");
        if (fresh) {
          role = segment.role;
          turn = segment.turn;
          section = el("section", { class: `tk-turn tk-by-${TOKENS_ROLES.has(role) ? role : "text"}` });
          if (!this.options.quiet || role !== "assistant" || turn > 0) section.append(this.roleHeader(index, from, to));
          blocks.push(section);
        }
        const inside = placed.filter(({ picture }) => picture.token >= start && picture.token < stop);
        section.append(this.segmentBlock(segment, index, start, stop, line, [...inside, ...(index === first ? loose : [])]));
      });
      if (first < 0 && loose.length > 0 && from === 0) {
        blocks.unshift(el("div", { class: "tk-pictures" }, loose.map(({ picture, index }) => this.figure(picture, index))));
      }
    }
    if (this.pages.length > 1) blocks.push(this.pager("bottom"));
    if (to === from) blocks.push(el("p", { class: "muted tk-nothing", text: "no tokens" }));
    empty(this.body, blocks);
    this.refreshShown();
    this.fillFirst();
    for (const chunk of this.chunks) this.observer.observe(chunk.element);
    this.remark();
  }

  pager(where) {
    const go = (step) => () => {
      this.page += step;
      this.build();
      this.element.scrollTop = 0;
      this.scrolled();
    };
    const [from, to] = this.pages[this.page];
    return el(
      "nav",
      { class: "tk-pager", "aria-label": `pages of tokens, ${where}` },
      el("button", { type: "button", text: "◀ earlier tokens", disabled: this.page === 0 ? "" : null, on: { click: go(-1) } }),
      el("span", { text: `tokens ${count(from)}–${count(to - 1)} of ${count(this.trajectory.ends.length)} · page ${this.page + 1} of ${this.pages.length}` }),
      el("button", { type: "button", text: "later tokens ▶", disabled: this.page === this.pages.length - 1 ? "" : null, on: { click: go(1) } }),
    );
  }

  // The header of a turn: of the segments from `index` on that have its role and turn.
  roleHeader(index, from, to) {
    const { trajectory } = this;
    const { role, turn } = trajectory.segments[index];
    let last = index;
    while (
      last + 1 < trajectory.segments.length && trajectory.segments[last + 1].role === role &&
      (role !== "assistant" || trajectory.segments[last + 1].turn === turn)
    ) last += 1;
    const start = Math.max(trajectory.segments[index].start, this.from);
    const stop = Math.min(trajectory.segments[last].stop, this.to);
    const share = maskedShare(trajectory, start, stop);
    const versions = segmentVersions(trajectory, start, stop);
    const facts = [];
    if (role === "assistant") facts.push(`turn ${turn + 1}`);
    const changed = [...versionChanges(trajectory)].some((token) => token >= start && token < stop);
    if (versions !== "") facts.push(changed ? `${versions} (the policy changed)` : versions);
    facts.push(plural(stop - start, "token"));
    if (start < from || stop > to) facts.push("continues on another page");
    const folder = last === index && trajectory.segments[index].kind === "text" ? this.foldButton(index) : null;
    return el(
      "header",
      { class: "tk-role" },
      folder,
      el("span", { class: "tk-role-name", text: role }),
      el("span", { class: "tk-facts", text: facts.join(" · ") }),
      share === 1 ? el("span", { class: "tk-badge", text: "masked", title: "None of these tokens are trained on." }) : null,
      share > 0 && share < 1 && role === "assistant"
        ? el("span", { class: "tk-badge", text: `${share < 0.01 ? "<1" : share > 0.99 ? ">99" : Math.round(100 * share)}% masked`, title: "Some of these tokens are not trained on." })
        : null,
    );
  }

  foldButton(index) {
    const folded = this.folded(index);
    const button = el("button", {
      class: "tk-fold", type: "button", "aria-expanded": String(!folded), "aria-label": "collapse", text: folded ? "▸" : "▾",
      on: { click: () => this.toggleFold(index) },
    });
    this.bodies.set(index, { button, body: null });
    return button;
  }

  segmentBlock(segment, index, start, stop, line, pictures) {
    const body = el("div", { class: "tk-text" });
    const kind = TOKENS_KINDS.has(segment.kind) ? segment.kind : "text";
    let header = null;
    let entry = this.bodies.get(index);
    if (entry === undefined && kind !== "text") {
      const button = this.foldButton(index);
      entry = this.bodies.get(index);
      header = el(
        "div",
        { class: "tk-kind" },
        button,
        el("span", { class: "tk-kind-name", text: TOKENS_KIND_WORDS[kind] }),
        segment.name ? el("span", { class: "tk-tool-name", text: visible(segment.name) }) : null,
        el("span", { class: "tk-facts", text: plural(Math.min(segment.stop, this.to) - Math.max(segment.start, this.from), "token") }),
      );
    }
    if (entry !== undefined) {
      entry.body = body;
      // "until-found": a folded text is still found by the browser's own search, which then unfolds it.
      if (this.folded(index)) body.setAttribute("hidden", "until-found");
      body.addEventListener("beforematch", () => this.setFolded(index, false));
    }
    this.pieces(body, start, stop, line, pictures, index);
    return el("div", { class: `tk-segment tk-of-${kind.replace("_", "-")}` }, header, body);
  }

  pieces(body, start, stop, line, pictures, segment) {
    const { trajectory } = this;
    const stops = new Set();
    const at = new Map(); // token -> figures before it
    for (const { picture, index } of pictures) {
      const token = Number.isInteger(picture.token) ? picture.token : start;
      // A picture stands before its run of pad tokens; the run may start later than the segment.
      if (token > start) stops.add(token);
      if (!at.has(token)) at.set(token, []);
      at.get(token).push(this.figure(picture, index));
    }
    let joined = true;
    for (const [from, to, clean] of tokensCuts(trajectory, start, stop, stops)) {
      if (at.has(from)) body.append(el("div", { class: "tk-pictures" }, at.get(from)));
      const layout = tokensLayout(trajectory, from, to, this.raw);
      const element = el("div", { class: joined ? "tk-chunk" : "tk-chunk tk-continued" });
      element.textContent = layout.text;
      let lines = Math.ceil(layout.text.length / line);
      for (let i = layout.text.indexOf("\n"); i >= 0 && i < layout.text.length - 1; i = layout.text.indexOf("\n", i + 1)) lines += 0.6;
      const height = Math.ceil(lines) * TOKENS_LINE;
      element.style.setProperty("contain-intrinsic-size", `auto none auto ${height}px`);
      const chunk = { element, height, start: from, stop: to, layout, segment, look: -1, count: 0, masked: maskedShare(trajectory, from, to) };
      if (chunk.masked === 1) element.classList.add("tk-masked");
      this.chunks.push(chunk);
      this.ofElement.set(element, chunk);
      body.append(element);
      joined = clean;
    }
  }

  figure(picture, index) {
    const url = this.options.mediaUrl ? this.options.mediaUrl(picture.sha256) : "";
    const size = picture.width && picture.height ? `${picture.width}×${picture.height}` : "";
    const name = `image ${index + 1}${size === "" ? "" : `, ${size}`}`;
    if (url === "") return el("div", { class: "tk-figure tk-figure-gone muted", text: `${name}: not in this file` });
    const image = el("img", {
      src: url, alt: name, loading: "lazy", decoding: "async", width: picture.width ?? null, height: picture.height ?? null,
      on: { error: () => figure.replaceChildren(el("span", { class: "muted", text: `${name}: image data missing` })) },
    });
    const { width, height } = picture;
    const small = width > 0 && height > 0 && Math.min(width, height) < TOKENS_SMALL;
    if (small && Math.max(width, height) < TOKENS_SMALL) {
      // By a whole number, so that each of its points is a square of the same size.
      const scale = Math.ceil(TOKENS_DRAWN / Math.max(width, height));
      image.classList.add("pixelated");
      image.style.setProperty("width", `${width * scale}px`);
    }
    const figure = el("button", {
      class: small ? "tk-figure tk-figure-small" : "tk-figure", type: "button", title: "enlarge",
      on: { click: () => this.options.onPicture && this.options.onPicture(picture, name) },
    }, image, el("span", { class: "tk-figure-note", text: size === "" ? "image" : size }));
    return figure;
  }

  // Chunks that are not folded away, in order: scrolling goes by these.
  refreshShown() {
    this.shown = this.chunks.filter((chunk) => chunk.segment < 0 || !this.bodies.has(chunk.segment) || !this.folded(chunk.segment));
  }

  toggleFold(index) {
    this.setFolded(index, !this.folded(index));
  }

  setFolded(index, folded) {
    const entry = this.bodies.get(index);
    if (this.folded(index) === folded) return;
    if (this.foldedUsually(this.trajectory.segments[index]) === folded) this.folds.delete(index);
    else this.folds.add(index);
    if (entry !== undefined) {
      if (folded) entry.body.setAttribute("hidden", "until-found");
      else entry.body.removeAttribute("hidden");
      entry.button.textContent = folded ? "▸" : "▾";
      entry.button.setAttribute("aria-expanded", String(!folded));
    }
    this.refreshShown();
    if (this.options.onFold) this.options.onFold(this.folds);
    this.scrolled();
  }

  // ---- colors

  setLens(lens, scale) {
    this.lens = lens;
    this.scale = scale;
    this.codes = lens === null ? null : lensCodes(this.trajectory, lens, scale);
    this.look += 1;
    for (const chunk of this.seen) this.fill(chunk);
    if (this.seen.size === 0) this.fillFirst();
  }

  // The first screenful is colored before it is painted, so that opening a page does not flash.
  fillFirst() {
    let height = 0;
    for (const chunk of this.shown) {
      if (height > TOKENS_SCREEN) break;
      this.fill(chunk);
      height += chunk.height;
    }
  }

  setMask(mode) {
    this.element.dataset.mask = mode;
  }

  setRaw(raw) {
    if (raw === this.raw) return;
    const top = this.topToken();
    this.raw = raw;
    this.look += 1;
    this.build();
    this.scrollToTop(top);
  }

  setFork(index) {
    this.fork = index;
    const chunk = this.chunkOf(index);
    if (chunk !== null) chunk.look = -1;
    if (chunk !== null && this.seen.has(chunk)) this.fill(chunk);
  }

  observed(entries) {
    for (const entry of entries) {
      const chunk = this.ofElement.get(entry.target);
      if (chunk === undefined) continue;
      if (entry.isIntersecting) {
        this.seen.add(chunk);
        this.fill(chunk);
      } else this.seen.delete(chunk);
    }
    if (this.elements > TOKENS_ELEMENTS) {
      for (const chunk of this.chunks) {
        if (chunk.count > 0 && !this.seen.has(chunk)) {
          chunk.element.textContent = chunk.layout.text;
          this.elements -= chunk.count;
          chunk.count = 0;
          chunk.look = -1;
          this.remarkChunk(chunk);
        }
        if (this.elements <= TOKENS_ELEMENTS / 2) break;
      }
    }
  }

  displayEnd(chunk, index) {
    const { layout } = chunk;
    return layout.ends === null ? this.trajectory.ends[index] - layout.base : layout.ends[index - chunk.start];
  }

  // Spans for runs of tokens that look alike; what is quiet stays bare text.
  fill(chunk) {
    if (chunk.look === this.look) return;
    chunk.look = this.look;
    const { codes, raw } = this;
    const { flags, versions, ends } = this.trajectory;
    const { text, ends: mapped, base } = chunk.layout;
    const diverging = this.scale !== null && this.scale.kind === "diverging";
    const side = diverging ? TOKENS_DIVERGING : 0;
    const someMasked = chunk.masked > 0 && chunk.masked < 1;
    const template = raw ? null : tokensTemplate(this.trajectory);
    const changes = versionChanges(this.trajectory);
    const drawsCursor = typeof Highlight === "undefined"; // no highlights in this browser: the cursor is a class
    const nodes = [];
    let spans = 0;
    let from = 0;
    let current = LENS_NONE;
    let carried = LENS_NONE; // the strongest color of the zero-width tokens before a character's last
    let version = "";
    const flush = (to) => {
      if (to === from) return;
      const part = text.slice(from, to);
      from = to;
      if (current === LENS_NONE) {
        nodes.push(part);
        return;
      }
      const span = document.createElement("span");
      span.className = tokensClass(current);
      if (current & TOKENS_VERSION) span.dataset.version = version;
      span.textContent = part;
      nodes.push(span);
      spans += 1;
    };
    let end = 0;
    for (let i = chunk.start; i < chunk.stop; i += 1) {
      const start = end;
      end = mapped === null ? ends[i] - base : mapped[i - chunk.start];
      let code = codes === null ? LENS_NONE : codes[i];
      if (carried !== LENS_NONE) {
        if (lensRank(carried, diverging) > lensRank(code, diverging)) code = carried;
        carried = LENS_NONE;
      }
      if (end === start) {
        carried = code;
        continue;
      }
      let look = code;
      if (code !== LENS_NONE) look = lensRank(code, diverging) === 0 ? LENS_NONE : code | side;
      if (flags[i] & SPECIAL_BIT || (template !== null && template[i])) look |= TOKENS_SPECIAL;
      if (someMasked && !(flags[i] & MASK_BIT)) look |= TOKENS_MASKED;
      if (raw && i & 1) look |= TOKENS_EVEN;
      if (i === this.fork) look |= TOKENS_FORK;
      if (drawsCursor && i === this.cursor) look |= TOKENS_AT;
      let apart = false;
      if (changes.has(i)) {
        look |= TOKENS_VERSION;
        apart = true;
      }
      if (look !== current || apart || raw) {
        flush(start);
        current = look;
        if (apart) version = `v${versions[i]}`;
      }
    }
    flush(end);
    if (from < text.length) nodes.push(text.slice(from));
    this.elements += spans - chunk.count;
    chunk.count = spans;
    chunk.element.replaceChildren(...nodes);
    this.remarkChunk(chunk);
  }

  // ---- places

  chunkOf(index) {
    let low = 0;
    let high = this.chunks.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.chunks[middle].stop > index) high = middle;
      else low = middle + 1;
    }
    const chunk = this.chunks[low];
    return chunk !== undefined && index >= chunk.start ? chunk : null;
  }

  // The text node and offset in it of a place in a chunk's display text.
  nodeAt(chunk, offset) {
    let left = offset;
    let last = null;
    for (const child of chunk.element.childNodes) {
      const node = child.nodeType === 3 ? child : child.firstChild;
      if (node === null) continue;
      if (left <= node.length) return [node, left];
      left -= node.length;
      last = node;
    }
    return last === null ? [chunk.element, 0] : [last, last.length];
  }

  range(chunk, from, to) {
    const range = document.createRange();
    // A place between two nodes belongs to the end of the first for nodeAt: as a start it is the second's beginning.
    let [node, offset] = this.nodeAt(chunk, from);
    if (node.nodeType === 3 && offset === node.length && to > from) [node, offset] = this.nodeAt(chunk, from + 1).map((x, i) => (i === 1 ? 0 : x));
    range.setStart(node, offset);
    range.setEnd(...this.nodeAt(chunk, to));
    return range;
  }

  // Display offsets [from, to) in its chunk of token `index`; a zero-width token has those of the token that completes it.
  extent(chunk, index) {
    let at = index;
    let from = at === chunk.start ? 0 : this.displayEnd(chunk, at - 1);
    while (this.displayEnd(chunk, at) === from && at + 1 < chunk.stop) at += 1;
    if (this.displayEnd(chunk, at) === from) {
      // Swallowed by the mark before it.
      at = index;
      while (at > chunk.start && this.displayEnd(chunk, at) === from) at -= 1;
      from = at === chunk.start ? 0 : this.displayEnd(chunk, at - 1);
    }
    return [from, this.displayEnd(chunk, at), at];
  }

  // tokenAt(x, y) -> the token drawn at a point of the window, or null.
  tokenAt(x, y) {
    let node;
    let offset;
    if (document.caretPositionFromPoint) {
      const caret = document.caretPositionFromPoint(x, y);
      if (caret === null) return null;
      node = caret.offsetNode;
      offset = caret.offset;
    } else {
      const caret = document.caretRangeFromPoint(x, y);
      if (caret === null) return null;
      node = caret.startContainer;
      offset = caret.startOffset;
    }
    const holder = (node.nodeType === 3 ? node.parentElement : node).closest(".tk-chunk");
    const chunk = holder === null ? undefined : this.ofElement.get(holder);
    if (chunk === undefined) return null;
    let place = node.nodeType === 3 ? offset : 0;
    let child = node.nodeType === 3 ? (node.parentNode === holder ? node : node.parentNode) : node === holder ? (holder.childNodes[offset] ?? null) : node;
    if (child === null) place = chunk.layout.text.length;
    else for (child = child.previousSibling; child !== null; child = child.previousSibling) place += child.textContent.length;
    // A caret stands between two characters: the point is on one of them, or on none.
    const { text } = chunk.layout;
    const after = (text.codePointAt(place) ?? 0) > 0xffff ? 2 : 1;
    const low = text.charCodeAt(place - 1) >= 0xdc00 && text.charCodeAt(place - 1) <= 0xdfff ? 2 : 1;
    for (const [from, to] of [[place, place + after], [place - low, place]]) {
      if (from < 0 || to > text.length) continue;
      for (const box of this.range(chunk, from, to).getClientRects()) {
        if (x >= box.left - 0.5 && x <= box.right + 0.5 && y >= box.top - 2 && y <= box.bottom + 2) return this.tokenOf(chunk, from);
      }
    }
    return null;
  }

  tokenOf(chunk, offset) {
    const { ends, base } = chunk.layout;
    if (ends !== null) return Math.min(chunk.start + tokensFindEnd(ends, offset, 0, ends.length), chunk.stop - 1);
    return Math.min(tokensFindEnd(this.trajectory.ends, offset + base, chunk.start, chunk.stop), chunk.stop - 1);
  }

  // ---- cursor, hits

  // Moves the cursor; scroll: "near" (only if out of sight), "center", or false.
  setCursor(index, scroll = "near") {
    const before = this.cursor;
    this.cursor = index === null ? -1 : Math.max(this.from, Math.min(this.trajectory.ends.length - 1, index));
    if (this.cursor >= 0) {
      this.turnTo(this.cursor);
      if (scroll !== false) this.reveal(this.cursor, scroll);
    }
    if (typeof Highlight === "undefined") {
      for (const at of [before, this.cursor]) {
        const chunk = at < 0 ? null : this.chunkOf(at);
        if (chunk !== null) {
          chunk.look = -1;
          this.fill(chunk);
        }
      }
    }
    this.remark();
  }

  // The page and the fold that hold a token, opened.
  turnTo(index) {
    const page = this.pages.findIndex(([from, to]) => index >= from && index < to);
    if (page >= 0 && page !== this.page) {
      this.page = page;
      this.build();
    }
    const chunk = this.chunkOf(index);
    if (chunk !== null && chunk.segment >= 0 && this.bodies.has(chunk.segment) && this.folded(chunk.segment)) this.setFolded(chunk.segment, false);
  }

  // Marks every place where `text` stands, and returns their tokens; letter case counts only where the text has capitals.
  find(text) {
    this.hits = [];
    if (text !== "") {
      const fold = text === text.toLowerCase();
      let place = tokenStart(this.trajectory, this.from);
      const folded = fold ? this.trajectory.text.toLowerCase() : this.trajectory.text;
      // A few letters change their length in lower case: then places would be off, and case counts after all.
      const haystack = folded.length === this.trajectory.text.length ? folded : this.trajectory.text;
      while (this.hits.length < 2000) {
        const at = haystack.indexOf(text, place);
        if (at < 0) break;
        this.hits.push([at, at + text.length]);
        place = at + text.length;
      }
    }
    this.remark();
    return this.hits.map(([at]) => tokensFindEnd(this.trajectory.ends, at, 0, this.trajectory.ends.length));
  }

  // A data offset as a display offset of the chunk.
  displayPlace(chunk, place) {
    const { layout } = chunk;
    if (layout.ends === null) return Math.max(0, Math.min(layout.text.length, place - layout.base));
    const token = tokensFindEnd(this.trajectory.ends, place, chunk.start, chunk.stop);
    if (token >= chunk.stop) return layout.text.length;
    const begin = token === chunk.start ? 0 : layout.ends[token - 1 - chunk.start];
    const inside = Math.max(0, place - tokenStart(this.trajectory, token));
    if (this.trajectory.flags[token] & SPECIAL_BIT && !this.raw) return begin;
    let shown = tokensEscape(tokenText(this.trajectory, token).slice(0, inside));
    if (this.raw) shown = shown.replaceAll("\n", "↵\n");
    return begin + shown.length;
  }

  // The data offset of a display offset: what is copied is the data.
  dataPlace(chunk, offset) {
    const { layout } = chunk;
    if (layout.ends === null) return layout.base + offset;
    const token = this.tokenOf(chunk, offset);
    const begin = token === chunk.start ? 0 : layout.ends[token - 1 - chunk.start];
    const start = tokenStart(this.trajectory, token);
    if (offset <= begin) return start;
    if (offset >= layout.ends[token - chunk.start]) return this.trajectory.ends[token];
    const text = tokenText(this.trajectory, token);
    for (let inside = 1; inside < text.length; inside += 1) {
      if (this.displayPlace(chunk, start + inside) >= offset) return start + inside;
    }
    return this.trajectory.ends[token];
  }

  dropRanges() {
    for (const [name, ranges] of this.ranges) {
      const highlight = tokensHighlight(name, 0);
      if (highlight !== null) for (const range of ranges) highlight.delete(range);
    }
    this.ranges.clear();
  }

  addRange(name, priority, chunk, from, to) {
    const highlight = tokensHighlight(name, priority);
    if (highlight === null || to <= from) return;
    const range = this.range(chunk, from, to);
    range.chunk = chunk;
    highlight.add(range);
    if (!this.ranges.has(name)) this.ranges.set(name, []);
    this.ranges.get(name).push(range);
  }

  remark() {
    this.dropRanges();
    if (this.hits.length > 0) for (const chunk of this.chunks) this.markHits(chunk);
    const chunk = this.cursor < 0 ? null : this.chunkOf(this.cursor);
    if (chunk !== null) this.markCursor(chunk);
  }

  // After a chunk was filled its text nodes are others, and ranges in it have collapsed.
  remarkChunk(chunk) {
    for (const [name, ranges] of this.ranges) {
      const highlight = tokensHighlight(name, 0);
      this.ranges.set(name, ranges.filter((range) => {
        if (range.chunk !== chunk) return true;
        highlight.delete(range);
        return false;
      }));
    }
    if (this.hits.length > 0) this.markHits(chunk);
    if (this.cursor >= chunk.start && this.cursor < chunk.stop) this.markCursor(chunk);
  }

  markHits(chunk) {
    const start = tokenStart(this.trajectory, chunk.start);
    const stop = this.trajectory.ends[chunk.stop - 1];
    for (const [from, to] of this.hits) {
      if (to > start && from < stop) this.addRange("tk-hit", 1, chunk, this.displayPlace(chunk, from), this.displayPlace(chunk, to));
    }
  }

  markCursor(chunk) {
    const [from, to, at] = this.extent(chunk, this.cursor);
    // There is one cursor on a page: whatever was marked before it, here or in another pane, is not it any more.
    for (const name of ["tk-cursor", "tk-part"]) {
      tokensHighlight(name, 2)?.clear();
      this.ranges.delete(name);
    }
    this.addRange(at === this.cursor ? "tk-cursor" : "tk-part", 2, chunk, from, to);
  }

  // ---- scrolling

  // Scrolls until a token is seen. Heights out of sight are estimates, so it looks again once they are known.
  reveal(index, align = "near", again = 2) {
    this.turnTo(index);
    const chunk = this.chunkOf(index);
    if (chunk === null) return;
    const [from, to] = this.extent(chunk, index);
    const pane = this.element.getBoundingClientRect();
    const box = this.range(chunk, from, to).getBoundingClientRect();
    const shown = box.height > 0 ? box : chunk.element.getBoundingClientRect();
    const room = Math.min(48, pane.height / 4);
    if (align === "center") this.element.scrollTop += shown.top - pane.top - pane.height / 2;
    else if (align === "top") this.element.scrollTop += shown.top - pane.top - 8;
    else if (shown.top < pane.top + room) this.element.scrollTop += shown.top - pane.top - room;
    else if (shown.bottom > pane.bottom - room) this.element.scrollTop += shown.bottom - pane.bottom + room;
    if (again > 0) requestAnimationFrame(() => this.element.isConnected && this.reveal(index, align, again - 1));
  }

  // The token (with a fraction) at a height of the content.
  tokenAtHeight(height) {
    const { shown } = this;
    if (shown.length === 0) return this.from;
    let low = 0;
    let high = shown.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (shown[middle].element.offsetTop <= height) low = middle;
      else high = middle - 1;
    }
    const chunk = shown[low];
    const { offsetTop, offsetHeight } = chunk.element;
    const share = offsetHeight === 0 ? 0 : Math.max(0, Math.min(1, (height - offsetTop) / offsetHeight));
    return chunk.start + share * (chunk.stop - chunk.start);
  }

  heightOf(token) {
    const { shown } = this;
    if (shown.length === 0) return 0;
    let low = 0;
    let high = shown.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (shown[middle].stop > token) high = middle;
      else low = middle + 1;
    }
    const chunk = shown[low];
    const { offsetTop, offsetHeight } = chunk.element;
    const share = Math.max(0, Math.min(1, (token - chunk.start) / (chunk.stop - chunk.start)));
    return offsetTop + share * offsetHeight;
  }

  topToken() {
    return this.tokenAtHeight(this.element.scrollTop);
  }

  bottomToken() {
    return this.tokenAtHeight(this.element.scrollTop + this.element.clientHeight);
  }

  scrollToTop(token) {
    const page = this.pages.findIndex(([from, to]) => token >= from && token < to);
    if (page >= 0 && page !== this.page) {
      this.page = page;
      this.build();
    }
    this.element.scrollTop = this.heightOf(token);
  }

  scrolled() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      if (this.element.isConnected && this.options.onScroll) this.options.onScroll(this);
    });
  }

  // ---- listeners: one of each for the whole pane

  listen() {
    const { element } = this;
    element.addEventListener("scroll", () => this.scrolled(), { passive: true });
    let down = null;
    element.addEventListener("pointerdown", (event) => {
      down = [event.clientX, event.clientY];
    });
    element.addEventListener("click", (event) => {
      if (event.target.closest("button, a")) return;
      // A drag selects text and leaves the cursor where it is.
      if (down !== null && Math.hypot(event.clientX - down[0], event.clientY - down[1]) > 4) return;
      const token = this.tokenAt(event.clientX, event.clientY);
      if (token !== null && this.options.onCursor) this.options.onCursor(token, this);
    });
    let pointer = null;
    element.addEventListener("pointermove", (event) => {
      if (!this.options.onHover) return;
      if (pointer === null) {
        requestAnimationFrame(() => {
          const at = pointer;
          pointer = null;
          this.options.onHover(this.tokenAt(at[0], at[1]), this, at);
        });
      }
      pointer = [event.clientX, event.clientY];
    });
    element.addEventListener("pointerleave", () => this.options.onHover && this.options.onHover(null, this));
    element.addEventListener("copy", (event) => this.copy(event));
  }

  // Copies the original text, without escapes and marks.
  copy(event) {
    const selection = getSelection();
    if (selection.rangeCount === 0 || selection.isCollapsed || event.clipboardData === null) return;
    const range = selection.getRangeAt(0);
    const place = (node, offset) => {
      const holder = (node.nodeType === 3 ? node.parentElement : node).closest?.(".tk-chunk");
      const chunk = holder ? this.ofElement.get(holder) : undefined;
      if (chunk === undefined) return null;
      const before = document.createRange();
      before.selectNodeContents(holder);
      before.setEnd(node, offset);
      return this.dataPlace(chunk, before.toString().length);
    };
    const from = place(range.startContainer, range.startOffset);
    const to = place(range.endContainer, range.endOffset);
    if (from === null || to === null) return;
    event.clipboardData.setData("text/plain", this.trajectory.text.slice(from, to));
    event.preventDefault();
  }

  close() {
    this.observer.disconnect();
    this.width.disconnect();
    this.dropRanges();
  }
}

/** Shows a picture as large as the window allows. */
export function showPicture(url, name) {
  const box = el("dialog", { class: "tk-zoom", "aria-label": name, on: { close: () => box.remove(), click: (event) => event.target === box && box.close() } },
    el("img", { src: url, alt: name, on: { load: ({ target }) => target.classList.toggle("pixelated", Math.max(target.naturalWidth, target.naturalHeight) < TOKENS_SMALL) } }),
    el("div", { class: "tk-zoom-foot" }, el("span", { class: "muted", text: name }), el("button", { class: "button small", type: "button", text: "Close", on: { click: () => box.close() } })));
  document.body.append(box);
  box.showModal();
}

/** Display modes of masked tokens, in the order of the key `m`. */
export const MASK_MODES = ["dim", "hatch", "off"];

/** A button bar with one choice: choices [[value, label, title]]; choose(value) is called with the new one. */
export function choiceBar(label, choices, value, choose) {
  const bar = el("div", { class: "segmented", role: "group", "aria-label": label });
  const set = (next) => {
    for (const button of bar.children) button.setAttribute("aria-pressed", String(button.dataset.value === next));
  };
  for (const [choiceValue, text, title] of choices) {
    bar.append(el("button", { type: "button", text, title: title ?? null, data: { value: choiceValue }, on: { click: () => choose(choiceValue) } }));
  }
  set(value);
  return { element: bar, set };
}

/** Flags of a sample, from its index row (or null) and its trajectory: [[text, tone, title]]. */
export function sampleFlags(row, trajectory) {
  const flags = [];
  const status = row?.status ?? trajectory?.status;
  if (status === "truncated") flags.push(["truncated", "warn", "truncated at a limit"]);
  else if (status === "aborted" || status === "error") flags.push([status, "bad", `ended with status ${status}`]);
  else if (status === "unfinished") flags.push(["unfinished", "", "not finished"]);
  if (row?.loop_at !== null && row?.loop_at !== undefined) flags.push([`loop @${count(row.loop_at)}`, "warn", "repetition loop starts at this response token"]);
  if (row?.nans > 0) flags.push([plural(row.nans, "NaN/Inf", "NaN/Inf"), "bad", "NaN or infinite values"]);
  if (row?.scored === 2) flags.push(["reward NaN", "bad", "the reward is NaN or infinite"]);
  if (row?.duplicate) flags.push(["duplicate", "warn", "identical to another sample of the group"]);
  if (row?.staleness > 1) flags.push([`staleness ${row.staleness}`, "", "policy versions between sampling and training"]);
  if (row?.state === "dropped") flags.push([`dropped${row.reason ? `: ${visible(row.reason)}` : ""}`, "bad", "dropped before training"]);
  if (row?.removed_reason) flags.push(["data removed", "warn", visible(row.removed_reason)]);
  if (row?.evaluation || trajectory?.evaluation) flags.push(["evaluation", "", "not trained on"]);
  return flags;
}

/** The flags as chips. */
export function flagChips(flags) {
  return flags.map(([text, tone, title]) => el("span", { class: tone === "" ? "chip" : `chip ${tone === "bad" ? "bad" : "warn"}`, text, title }));
}

/** Text of the last user segment of the prompt, without template marks, in one line. */
export function questionText(trajectory) {
  const question = trajectory.segments.filter((segment) => segment.role === "user" && segment.start < trajectory.prompt_tokens).pop();
  if (question === undefined) return "";
  const template = tokensTemplate(trajectory);
  let text = "";
  for (let i = question.start; i < Math.min(question.stop, question.start + 400); i += 1) {
    if (!(trajectory.flags[i] & SPECIAL_BIT) && !template[i]) text += tokenText(trajectory, i);
  }
  return text.replace(/\s+/g, " ").trim();
}

/** The name of a sample within its group: "#3", and "#3.1" where a rollout has several records. */
export function sampleName(sample, several) {
  return several ? `#${sample.run}.${sample.turn}` : `#${sample.run}`;
}

// The first token where two responses differ, counted in the first's tokens, or -1 where one is the other's beginning and
// they have the same length.
export function firstDivergence(a, b) {
  const na = a.ends.length - a.prompt_tokens;
  const nb = b.ends.length - b.prompt_tokens;
  const least = Math.min(na, nb);
  for (let i = 0; i < least; i += 1) {
    const x = a.prompt_tokens + i;
    const y = b.prompt_tokens + i;
    const same = a.ids !== null && b.ids !== null ? a.ids[x] === b.ids[y] : tokenText(a, x) === tokenText(b, y);
    if (!same) return i;
  }
  return na === nb ? -1 : least;
}
