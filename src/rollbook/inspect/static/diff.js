// Differences between two sequences, for tokens and for words: exact where that is cheap, anchored where texts are long.
// Invariant: the pieces cover both sequences in order, and every piece marked the same is equal item by item.

import { el, empty, visible, count, percent } from "./dom.js";

const DIFF_WORK = 6_000_000; // steps of the inner loop in all: some tens of milliseconds
const DIFF_DEPTH = 1_200; // edits that one box may take before it is cut at anchors
const DIFF_GRAM = 4;

// diffPieces(a, b) -> [{same, a: [from, to], b: [from, to]}]; a and b are arrays of strings or numbers.
export function diffPieces(a, b) {
  const numbers = new Map();
  const intern = (items) =>
    Int32Array.from(items, (item) => {
      if (!numbers.has(item)) numbers.set(item, numbers.size);
      return numbers.get(item);
    });
  const state = { a: intern(a), b: intern(b), work: DIFF_WORK, same: [] };
  diffBox(state, 0, a.length, 0, b.length, DIFF_GRAM);
  // `same` holds runs [a from, b from, length], ascending; what lies between them differs.
  const pieces = [];
  let x = 0;
  let y = 0;
  const add = (same, toX, toY) => {
    const last = pieces[pieces.length - 1];
    if (last !== undefined && last.same === same) {
      last.a[1] = toX;
      last.b[1] = toY;
    } else pieces.push({ same, a: [x, toX], b: [y, toY] });
    x = toX;
    y = toY;
  };
  for (const [fromX, fromY, length] of state.same) {
    if (fromX > x || fromY > y) add(false, fromX, fromY);
    if (length > 0) add(true, fromX + length, fromY + length);
  }
  if (x < a.length || y < b.length) add(false, a.length, b.length);
  return pieces;
}

function diffBox(state, a0, a1, b0, b1, gram) {
  const { a, b, same } = state;
  let head = 0;
  while (a0 + head < a1 && b0 + head < b1 && a[a0 + head] === b[b0 + head]) head += 1;
  if (head > 0) same.push([a0, b0, head]);
  a0 += head;
  b0 += head;
  let tail = 0;
  while (a1 - tail > a0 && b1 - tail > b0 && a[a1 - tail - 1] === b[b1 - tail - 1]) tail += 1;
  a1 -= tail;
  b1 -= tail;
  if (a0 < a1 && b0 < b1) {
    const reached = diffMyers(state, a0, a1, b0, b1);
    if (reached !== null) {
      let anchors = [];
      let size = gram;
      for (; size > 0 && anchors.length === 0; size -= 1) anchors = diffAnchors(state, a0, a1, b0, b1, size);
      if (anchors.length > 0) {
        size += 1;
        let x = a0;
        let y = b0;
        for (const [atX, atY] of anchors) {
          if (atX < x || atY < y) continue; // inside what the run before it took
          diffBox(state, x, atX, y, atY, size - 1);
          let length = size;
          while (atX + length < a1 && atY + length < b1 && a[atX + length] === b[atY + length]) length += 1;
          same.push([atX, atY, length]);
          x = atX + length;
          y = atY + length;
        }
        diffBox(state, x, a1, y, b1, size - 1);
      } else if (reached.depth > 0) {
        // Nothing stands out (a loop, say): keep the best way so far, and go on from where it ends.
        diffWalk(state, reached.trail, a0, b0, reached.x, reached.y, reached.depth);
        diffBox(state, a0 + reached.x, a1, b0 + reached.y, b1, gram);
      }
    }
  }
  if (tail > 0) same.push([a1, b1, tail]);
}

// Myers' greedy algorithm, its way kept to walk back: null where it came to the end, and the way is in state.same; else
// how far it came within the edits it may take ({depth: 0} where no work is left).
function diffMyers(state, a0, a1, b0, b1) {
  const { a, b } = state;
  const n = a1 - a0;
  const m = b1 - b0;
  const most = Math.min(n + m, DIFF_DEPTH);
  const reach = new Int32Array(2 * most + 3);
  const middle = most + 1;
  const trail = [];
  for (let d = 0; d <= most; d += 1) {
    state.work -= d + 1;
    if (state.work <= 0) return { depth: 0 };
    let best = { x: 0, y: 0 };
    for (let k = -d; k <= d; k += 2) {
      let x = k === -d || (k !== d && reach[middle + k - 1] < reach[middle + k + 1]) ? reach[middle + k + 1] : reach[middle + k - 1] + 1;
      let y = x - k;
      const start = x;
      while (x < n && y < m && a[a0 + x] === b[b0 + y]) {
        x += 1;
        y += 1;
      }
      state.work -= x - start;
      reach[middle + k] = x;
      if (x >= n && y >= m) {
        diffWalk(state, trail, a0, b0, x, y, d);
        return null;
      }
      if (d === most && x <= n && y <= m && x + y > best.x + best.y) best = { x, y };
    }
    if (d === most) return { ...best, depth: d, trail };
    trail.push(reach.slice(middle - d - 1, middle + d + 2)); // diagonals -d-1 .. d+1
  }
  return { depth: 0 };
}

// Walks back from (x, y), reached with `depth` edits, and notes the equal runs on the way.
function diffWalk(state, trail, a0, b0, x, y, depth) {
  const runs = [];
  for (let d = depth; d > 0; d -= 1) {
    const before = trail[d - 1]; // index of diagonal k is k + d
    const k = x - y;
    const down = k === -d || (k !== d && before[k - 1 + d] < before[k + 1 + d]);
    const fromK = down ? k + 1 : k - 1;
    const fromX = before[fromK + d];
    const fromY = fromX - fromK;
    const midX = down ? fromX : fromX + 1;
    if (x > midX) runs.push([a0 + midX, b0 + midX - k, x - midX]);
    x = fromX;
    y = fromY;
  }
  if (x > 0) runs.push([a0, b0, x]);
  for (let i = runs.length - 1; i >= 0; i -= 1) state.same.push(runs[i]);
}

// Places where `gram` items in a row occur exactly once in either box, in an order both share (the longest such).
function diffAnchors(state, a0, a1, b0, b1, gram) {
  const { a, b } = state;
  const key = (items, i) => {
    let text = "";
    for (let j = 0; j < gram; j += 1) text += items[i + j] + ",";
    return text;
  };
  const seen = new Map(); // key -> [place in a or -1 for several, place in b or -1]
  for (let i = a0; i + gram <= a1; i += 1) {
    const at = key(a, i);
    const entry = seen.get(at);
    if (entry === undefined) seen.set(at, [i, -2]);
    else entry[0] = -1;
  }
  for (let j = b0; j + gram <= b1; j += 1) {
    const entry = seen.get(key(b, j));
    if (entry !== undefined) entry[1] = entry[1] === -2 ? j : -1;
  }
  const pairs = [...seen.values()].filter(([x, y]) => x >= 0 && y >= 0).sort((p, q) => p[0] - q[0]);
  const ends = []; // ends[l]: index in pairs of the smallest end of an ascending row of length l + 1
  const before = new Int32Array(pairs.length).fill(-1);
  pairs.forEach(([, y], index) => {
    let low = 0;
    let high = ends.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (pairs[ends[middle]][1] < y) low = middle + 1;
      else high = middle;
    }
    if (low > 0) before[index] = ends[low - 1];
    ends[low] = index;
  });
  const chosen = [];
  for (let at = ends.length > 0 ? ends[ends.length - 1] : -1; at >= 0; at = before[at]) chosen.push(pairs[at]);
  return chosen.reverse();
}

// Words of a text: letters and digits together, runs of spaces, each other character alone; they join to the text.
export function diffWords(text) {
  return text.match(/[\p{L}\p{N}_]+|\s+|[^\p{L}\p{N}_\s]/gu) ?? [];
}

// The items of a trajectory's response: {items: compared, texts: shown}.
export function diffItems(trajectory, by) {
  const from = trajectory.prompt_tokens;
  const start = from === 0 ? 0 : trajectory.ends[from - 1];
  if (by === "word") {
    const texts = diffWords(trajectory.text.slice(start));
    return { items: texts, texts };
  }
  const texts = [];
  let last = start;
  for (let i = from; i < trajectory.ends.length; i += 1) {
    texts.push(trajectory.text.slice(last, trajectory.ends[i]));
    last = trajectory.ends[i];
  }
  return { items: trajectory.ids === null ? texts : trajectory.ids.subarray(from), texts };
}

// A blank between two changes is part of the change: "Let me" against "We need" is one difference, not two.
function diffJoined(pieces, texts) {
  const joined = [];
  pieces.forEach((piece, index) => {
    const inside = index > 0 && index < pieces.length - 1;
    const blank = piece.same && inside && piece.a[1] - piece.a[0] === 1 && /^[ \t]+$/.test(texts[piece.a[0]]);
    const last = joined[joined.length - 1];
    if (last !== undefined && !last.same && (blank || !piece.same)) {
      last.a = [last.a[0], piece.a[1]];
      last.b = [last.b[0], piece.b[1]];
    } else joined.push({ ...piece });
  });
  return joined;
}

const DIFF_EQUAL_SHOWN = 60; // items of an equal run shown on either side of a fold

// diffView(a, b, {by, labels}) -> element: rows of two cells, equal text on both sides, changes marked as text decoration
// and color; long equal runs are folded.
export function diffView(a, b, { by, labels }) {
  const left = diffItems(a, by);
  const right = diffItems(b, by);
  const exact = diffPieces(left.items, right.items);
  const pieces = by === "word" ? diffJoined(exact, left.texts) : exact;
  let same = 0;
  let gone = 0;
  let come = 0;
  for (const piece of exact) {
    if (piece.same) same += piece.a[1] - piece.a[0];
    else {
      gone += piece.a[1] - piece.a[0];
      come += piece.b[1] - piece.b[0];
    }
  }
  const text = (side, range) => visible(side.texts.slice(range[0], range[1]).join(""));
  const rows = el("div", { class: "diff-rows" });
  let row = null;
  const open = () => {
    row = [el("div", { class: "diff-cell" }), el("div", { class: "diff-cell" })];
    rows.append(el("div", { class: "diff-row" }, row));
  };
  open();
  const equal = (piece, from, to) => {
    row[0].append(text(left, [piece.a[0] + from, piece.a[0] + to]));
    row[1].append(text(right, [piece.b[0] + from, piece.b[0] + to]));
  };
  pieces.forEach((piece, index) => {
    if (!piece.same) {
      if (piece.a[1] > piece.a[0]) row[0].append(el("del", { class: "diff-gone", text: text(left, piece.a) }));
      if (piece.b[1] > piece.b[0]) row[1].append(el("ins", { class: "diff-come", text: text(right, piece.b) }));
      return;
    }
    const length = piece.a[1] - piece.a[0];
    const before = index === 0 ? 0 : DIFF_EQUAL_SHOWN;
    const after = index === pieces.length - 1 ? 0 : DIFF_EQUAL_SHOWN;
    if (length <= before + after + 40) {
      equal(piece, 0, length);
      // A row for each paragraph or so keeps the two sides beside each other.
      if (index < pieces.length - 1 && text(left, piece.a).includes("\n")) open();
      return;
    }
    equal(piece, 0, before);
    const hidden = length - before - after;
    const fold = el("button", {
      class: "diff-fold", type: "button", text: `${count(hidden)} equal ${by}s`,
      title: "show",
    });
    fold.addEventListener("click", () => {
      const cells = [el("div", { class: "diff-cell" }), el("div", { class: "diff-cell" })];
      cells[0].textContent = text(left, [piece.a[0] + before, piece.a[1] - after]);
      cells[1].textContent = text(right, [piece.b[0] + before, piece.b[1] - after]);
      fold.replaceWith(el("div", { class: "diff-row" }, cells));
    });
    rows.append(fold);
    open();
    equal(piece, length - after, length);
  });
  const total = same + Math.max(gone, come);
  const head = el(
    "div",
    { class: "diff-head" },
    el("span", { class: "diff-name" }, labels[0]),
    el("span", { class: "diff-name" }, labels[1]),
  );
  const sum = el("p", {
    class: "diff-sum muted",
    text: total === 0
      ? "both texts are empty"
      : `${percent(same / total)} of ${by}s equal · ${count(gone)} only on the left · ${count(come)} only on the right`,
  });
  const element = el("div", { class: "diff-view" });
  empty(element, sum, head, rows);
  return element;
}
