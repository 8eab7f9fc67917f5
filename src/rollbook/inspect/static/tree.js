// The fork tree of a group: where its samples part, how many go each way, and how each way is rewarded.
// Invariant: the samples of a node share every response token before its `stop`, and its children part them completely.

import { el, svg, number, count, plural, visible } from "./dom.js";
import { tokenText } from "./tokens.js";

const TREE_NODES = 40;
const TREE_ROW = 26;
const TREE_COLUMNS = [210, 330]; // least and greatest width of a level, pixels
const TREE_LABEL = 34; // characters

function treeToken(trajectory, position) {
  const at = trajectory.prompt_tokens + position;
  if (at >= trajectory.ends.length) return null;
  return trajectory.ids === null ? tokenText(trajectory, at) : trajectory.ids[at];
}

// forkTree(trajectories) -> {root, nodes, cut}: nodes {start, stop, samples, children, depth, ended}; positions count response
// tokens. At most `most` nodes are opened, those with the most samples first; `cut` says how many were left shut.
export function forkTree(trajectories, most = TREE_NODES) {
  const grow = (samples, start, depth) => {
    let stop = start;
    const first = trajectories[samples[0]];
    for (;;) {
      const token = treeToken(first, stop);
      if (token === null || !samples.every((sample) => treeToken(trajectories[sample], stop) === token)) break;
      stop += 1;
    }
    return { start, stop, samples, children: [], depth, opened: false };
  };
  const split = (node) => {
    const ways = new Map();
    for (const sample of node.samples) {
      const token = treeToken(trajectories[sample], node.stop);
      if (!ways.has(token)) ways.set(token, []);
      ways.get(token).push(sample);
    }
    return [...ways.values()];
  };
  if (trajectories.length === 0) return { root: null, nodes: 0, cut: 0 };
  const root = grow(trajectories.map((_, i) => i), 0, 0);
  const waiting = [root];
  let nodes = 1;
  let cut = 0;
  while (waiting.length > 0) {
    waiting.sort((a, b) => b.samples.length - a.samples.length || a.stop - b.stop);
    const node = waiting.shift();
    const ways = node.samples.length > 1 ? split(node) : [];
    if (ways.length < 2) continue; // one sample, or equal ones
    if (nodes + ways.length > most && node !== root) {
      cut += 1;
      continue;
    }
    node.opened = true;
    node.children = ways.sort((a, b) => b.length - a.length).map((samples) => grow(samples, node.stop, node.depth + 1));
    nodes += ways.length;
    waiting.push(...node.children);
  }
  return { root, nodes, cut };
}

// The mean of `read(sample)` over samples that have a number, or null.
function treeMean(samples, read) {
  const values = samples.map(read).filter((value) => Number.isFinite(value));
  return values.length === 0 ? null : values.reduce((sum, value) => sum + value, 0) / values.length;
}

function treeText(trajectory, start, stop) {
  let text = "";
  for (let i = start; i < stop; i += 1) text += tokenText(trajectory, trajectory.prompt_tokens + i);
  return text;
}

function treeShort(text, end) {
  const flat = visible(text).replace(/\n/g, "⏎");
  if (flat.length <= TREE_LABEL) return flat;
  return end ? `…${flat.slice(-TREE_LABEL)}` : `${flat.slice(0, TREE_LABEL)}…`;
}

/**
 * forkTreeView({trajectories, rewards, names, onFocus(samples, position)}) -> {element, tree}. A node's button shows the text
 * its samples go on with; the thickness of a line is how many go that way, its color their mean reward.
 */
export function forkTreeView({ trajectories, rewards, names, onFocus, most }) {
  const tree = forkTree(trajectories, most);
  const element = el("div", { class: "fork" });
  if (tree.root === null) return { element, tree };
  const finite = rewards.filter((reward) => Number.isFinite(reward));
  const least = Math.min(...finite);
  const top = Math.max(...finite);
  const shade = (mean) => (mean === null || !(top > least) ? 7 : Math.round((15 * (mean - least)) / (top - least)));
  const placed = [];
  let row = 0;
  let depth = 0;
  // Leaves take rows from top to bottom; a node stands at the middle of its children.
  const place = (node, parent) => {
    node.parent = parent;
    placed.push(node); // before its children: the order in which a tree is read
    depth = Math.max(depth, node.depth);
    if (node.children.length === 0) {
      node.y = row;
      row += 1;
    } else {
      for (const child of node.children) place(child, node);
      node.y = (node.children[0].y + node.children[node.children.length - 1].y) / 2;
    }
  };
  place(tree.root, null);
  const level = Math.max(TREE_COLUMNS[0], Math.min(TREE_COLUMNS[1], Math.floor((window.innerWidth - 80) / (depth + 1))));
  const width = (depth + 1) * level;
  const height = row * TREE_ROW + 8;
  const lines = svg("svg", { class: "fork-lines", width: String(width), height: String(height), viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  const holder = el("div", { class: "fork-canvas", role: "tree", "aria-label": "where samples diverge" }, lines);
  holder.style.setProperty("width", `${width}px`);
  holder.style.setProperty("height", `${height}px`);
  const all = trajectories.length;
  for (const node of placed) {
    const mean = treeMean(node.samples, (sample) => rewards[sample]);
    const first = trajectories[node.samples[0]];
    const entropies = (sample) => {
      const values = trajectories[sample].arrays.entropy;
      return values === undefined ? NaN : values[trajectories[sample].prompt_tokens + node.stop];
    };
    node.entropy = node.opened ? treeMean(node.samples, entropies) : null;
    const shared = treeText(first, node.start, Math.min(node.stop, node.start + 200));
    const tail = treeText(first, Math.max(node.start, node.stop - 60), node.stop);
    const label = node.parent === null ? (tail === "" ? "start" : treeShort(tail, true)) : shared === "" ? "(ends)" : treeShort(shared, false);
    const x = node.depth * level;
    const y = node.y * TREE_ROW + 4;
    if (node.parent !== null) {
      const thick = Math.max(1.2, (7 * node.samples.length) / all);
      const x0 = node.depth * level - 24;
      const y0 = node.parent.y * TREE_ROW + 4 + (TREE_ROW - 4) / 2;
      const y1 = y + (TREE_ROW - 4) / 2;
      lines.append(svg("path", { class: `fork-line fork-r${shade(mean)}`, d: `M ${x0} ${y0} C ${x0 + 12} ${y0}, ${x - 12} ${y1}, ${x} ${y1}`, "stroke-width": String(thick) }));
    }
    const words = [`${plural(node.samples.length, "sample")}`];
    if (mean !== null) words.push(`mean reward ${number(mean)}`);
    if (node.opened) words.push(`splits into ${node.children.length} after ${count(node.stop)} response tokens`);
    if (node.entropy !== null) words.push(`entropy at the split ${number(node.entropy)}`);
    if (!node.opened && node.samples.length === 1) words.push(names[node.samples[0]]);
    const single = node.samples.length === 1;
    const button = el(
      "button",
      {
        class: `fork-node${node.opened ? "" : " fork-leaf"}`, type: "button", role: "treeitem", tabindex: node === tree.root ? "0" : "-1",
        "aria-level": String(node.depth + 1), "aria-label": `${visible(label)}: ${words.join(", ")}`,
        title: `${visible(shared).slice(0, 400)}\n${words.join(" · ")}`,
        on: { click: () => onFocus(node.samples, node.parent === null ? node.stop : node.start) },
      },
      el("span", { class: `fork-mark tq-d${shade(mean)}` }),
      el("span", { class: "fork-label", text: label }),
      el("span", { class: "fork-n", text: single ? names[node.samples[0]] : `×${node.samples.length}` }),
      mean === null ? null : el("span", { class: "fork-reward", text: `r ${number(mean)}` }),
      node.entropy === null ? null : el("span", { class: "fork-entropy", text: `H ${number(node.entropy)}` }),
    );
    // A node that goes on is as wide as its level, so that its lines begin where it ends.
    if (node.opened) button.style.setProperty("width", `${level - 24}px`);
    button.style.setProperty("max-width", `${level - 24}px`);
    button.style.setProperty("left", `${x}px`);
    button.style.setProperty("top", `${y}px`);
    node.button = button;
    holder.append(button);
  }
  holder.addEventListener("keydown", (event) => {
    const node = placed.find((candidate) => candidate.button === event.target);
    if (node === undefined) return;
    let next = null;
    if (event.key === "ArrowLeft") next = node.parent;
    else if (event.key === "ArrowRight") next = node.children[0] ?? null;
    else if (event.key === "ArrowUp" || event.key === "ArrowDown") {
      const row = placed.filter((candidate) => candidate.depth === node.depth);
      next = row[row.indexOf(node) + (event.key === "ArrowUp" ? -1 : 1)] ?? null;
    } else return;
    event.preventDefault();
    event.stopPropagation();
    if (next === null) return;
    for (const sibling of placed) sibling.button.setAttribute("tabindex", sibling === next ? "0" : "-1");
    next.button.focus();
  });
  element.append(el("div", { class: "fork-scroll" }, holder));
  return { element, tree };
}
