// What bench_viewer_page.py runs in the browser: sixteen panes painted, recolored and scrolled together, by the viewer's panes and
// by one element per token.

import { decodeFrame } from "/static/frame.js";
import { lensCodes, lensScale } from "/static/lenses.js";
import { TokenPane } from "/static/tokens.js";
import { TokenStrip } from "/static/strip.js";

const LENSES = [
  { id: "entropy", label: "Entropy", scale: { kind: "sequential", low: 0, high: 2.5, middle: null } },
  { id: "mismatch", label: "Mismatch", scale: { kind: "diverging", low: -0.3, high: 0.3, middle: 0 } },
];

// Resolves once a frame with everything done so far is on the screen.
function painted() {
  return new Promise((done) => requestAnimationFrame(() => {
    const channel = new MessageChannel();
    channel.port1.onmessage = () => done();
    channel.port2.postMessage(null);
  }));
}

function viewerPanes(trajectories, holder) {
  const panes = [];
  const strips = [];
  return {
    async build() {
      for (const trajectory of trajectories) {
        const box = document.createElement("div");
        box.className = "bench-cell";
        const pane = new TokenPane({ trajectory, from: trajectory.prompt_tokens, label: "response", width: 180, lens: LENSES[0], scale: lensScale(LENSES[0]) });
        const strip = new TokenStrip({ trajectory, from: trajectory.prompt_tokens, length: trajectory.ends.length, onSeek() {} });
        box.append(strip.element, pane.element);
        holder.append(box);
        strip.draw(LENSES[0], lensScale(LENSES[0]));
        panes.push(pane);
        strips.push(strip);
      }
    },
    color(lens) {
      for (const pane of panes) pane.setLens(lens, lensScale(lens));
      for (const strip of strips) strip.draw(lens, lensScale(lens));
    },
    scrollers: () => panes.map((pane) => pane.element),
  };
}

// One element for each token with its color as an inline style and its numbers as a title, as simple viewers do it.
function elementPanes(trajectories, holder) {
  const panes = [];
  const colorOf = (lens, trajectory) => {
    const style = getComputedStyle(document.documentElement);
    const name = lens.scale.kind === "diverging" ? "--div-" : "--seq-";
    const palette = Array.from({ length: 16 }, (_, i) => style.getPropertyValue(name + i));
    const codes = lensCodes(trajectory, lens, lensScale(lens));
    return (i) => palette[Math.min(15, codes[i])] ?? "transparent";
  };
  const fill = (pane, trajectory, lens) => {
    const color = colorOf(lens, trajectory);
    const values = trajectory.arrays[lens.id];
    const all = document.createDocumentFragment();
    for (let i = trajectory.prompt_tokens; i < trajectory.ends.length; i += 1) {
      const span = document.createElement("span");
      span.textContent = trajectory.text.slice(trajectory.ends[i - 1], trajectory.ends[i]);
      span.style.backgroundColor = color(i);
      span.title = `${i} ${lens.label} ${values[i].toFixed(3)}`;
      all.append(span);
    }
    pane.replaceChildren(all);
  };
  return {
    async build() {
      for (const trajectory of trajectories) {
        const box = document.createElement("div");
        box.className = "bench-cell";
        const pane = document.createElement("div");
        pane.className = "tk-pane bench-plain";
        box.append(pane);
        holder.append(box);
        panes.push(pane);
        fill(pane, trajectory, LENSES[0]);
      }
    },
    color(lens) {
      panes.forEach((pane, i) => fill(pane, trajectories[i], lens));
    },
    scrollers: () => panes,
  };
}

// One page's life: {paint, recolor, scroll50, scroll95 (milliseconds), elements}.
export async function benchRound(way) {
  const trajectories = decodeFrame(await (await fetch("/frame")).arrayBuffer());
  const holder = document.getElementById("holder");
  const made = (way === "viewer" ? viewerPanes : elementPanes)(trajectories, holder);
  await painted();
  let start = performance.now();
  await made.build();
  await painted();
  const paint = performance.now() - start;
  await new Promise((done) => setTimeout(done, 700));
  start = performance.now();
  made.color(LENSES[1]);
  await painted();
  const recolor = performance.now() - start;
  await new Promise((done) => setTimeout(done, 300));
  const frames = [];
  let last = performance.now();
  for (let i = 0; i < 60; i += 1) {
    for (const scroller of made.scrollers()) scroller.scrollTop += 45;
    await new Promise((done) => requestAnimationFrame(done));
    const now = performance.now();
    frames.push(now - last);
    last = now;
  }
  frames.sort((a, b) => a - b);
  return { paint, recolor, scroll50: frames[30], scroll95: frames[57], elements: document.querySelectorAll("*").length };
}
window.benchRound = benchRound;
