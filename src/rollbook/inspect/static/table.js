// table.js: long tables: only the rows in sight exist, and one row at a time takes the focus.
// Invariant: rows that come or change elsewhere move neither the focus nor what is under the reader's eyes.

import { el } from "./dom.js";

const tableSpare = 12; // rows kept above and below those in sight
const tableMost = 300000; // rows a page can be long: browsers lose count beyond 16 million pixels

/**
 * A table that scrolls with the page.
 * options: {label, columns: [{id, label, help, width, num, sort (name, or null), first ("-": sorts high to low first),
 *   drop (1, 2: left out of narrow, of very narrow windows), cell(row)}],
 *   source: {total(), row(i) -> object or null while it is on its way, want(from, to), find(key) -> i or -1}, key(row), words(row),
 *   onOpen(row, event), onMove(row), sort ("-reward"), onSort(sort), selected(row), bottom() (pixels covered there)}.
 */
export function dataTable(options) {
  const { columns, source } = options;
  const rowHeight = 34;
  let sort = options.sort || "";
  let current = null; // key of the row that takes the focus
  let place = 0; // its index
  const nodes = new Map(); // key -> {node, row}
  let range = [0, 0];

  function cellClass(column) {
    const words = [column.num ? "num" : "", column.drop === 1 ? "drop-1" : column.drop === 2 ? "drop-2" : ""].filter(Boolean);
    return words.length ? words.join(" ") : null;
  }
  const heads = columns.map((column) => {
    const arrow = el("span", { class: "arrow", aria: { hidden: "true" } });
    const node = el("th", { scope: "col", class: cellClass(column), title: column.help || null },
      column.sort ? el("button", { type: "button", on: { click: () => resort(column) } }, column.num ? arrow : null, column.label, column.num ? null : arrow) : column.label);
    return { column, node, arrow };
  });
  // One cell, not one across all columns: that would keep room for the columns that a narrow window leaves out.
  const above = el("tr", { class: "spacer", aria: { hidden: "true" } }, el("td"));
  const below = el("tr", { class: "spacer", aria: { hidden: "true" } }, el("td"));
  const body = el("tbody", null, above, below);
  const table = el("table", { class: "grid sticky", role: "grid", aria: { label: options.label, rowcount: "0", multiselectable: options.selected ? "true" : null }, style: { "overflow-anchor": "none" } },
    el("colgroup", null, columns.map((column) => el("col", { class: cellClass(column), style: { width: column.width } }))),
    el("thead", null, el("tr", null, heads.map((head) => head.node))),
    body);
  const box = el("div", { class: "grid-box" }, table); // a narrow window moves the table sideways, not the page

  function paintHeads() {
    for (const { column, node, arrow } of heads) {
      if (!column.sort) continue;
      const on = sort === column.sort || sort === "-" + column.sort;
      const down = sort.startsWith("-");
      node.setAttribute("aria-sort", on ? (down ? "descending" : "ascending") : "none");
      arrow.textContent = on ? (down ? "↓" : "↑") : "";
    }
  }
  function resort(column) {
    const first = column.first === "-" ? "-" + column.sort : column.sort;
    const other = column.first === "-" ? column.sort : "-" + column.sort;
    sort = sort === first ? other : first;
    paintHeads();
    options.onSort(sort);
  }
  function size() {
    return Math.min(source.total(), tableMost);
  }
  function make(row, i) {
    if (!row) return el("tr", { class: "wait" }, columns.map((c) => el("td", { class: cellClass(c) }, el("span", { class: "muted", text: "…" }))));
    const node = el("tr", { tabindex: "-1", aria: { rowindex: String(i + 2) } },
      columns.map((column) => el("td", { class: cellClass(column) }, column.cell(row))));
    node.addEventListener("click", (event) => {
      if (event.target.closest("a, button, input")) return;
      const marked = getSelection();
      if (!marked.isCollapsed && node.contains(marked.anchorNode)) return; // somebody marks text to copy it
      focus(options.key(row));
      options.onOpen(row, event);
    });
    node.addEventListener("focus", () => mark(options.key(row)));
    return node;
  }
  function mark(key) {
    if (current === key) return;
    const old = nodes.get(current);
    if (old) {
      old.node.setAttribute("aria-current", "false");
      old.node.tabIndex = -1;
    }
    current = key;
    const index = source.find(key);
    if (index >= 0) place = index;
    const entry = nodes.get(key);
    if (entry) {
      entry.node.setAttribute("aria-current", "true");
      entry.node.tabIndex = 0;
      if (options.onMove && entry.row) options.onMove(entry.row);
    }
  }
  function draw(force) {
    if (!table.isConnected) return;
    const total = size();
    const top = body.getBoundingClientRect().top;
    const from = Math.max(0, Math.min(total, Math.floor(-top / rowHeight) - tableSpare));
    const to = Math.min(total, Math.max(from, Math.ceil((window.innerHeight - top) / rowHeight)) + tableSpare);
    if (!force && from === range[0] && to === range[1]) return;
    range = [from, to];
    if (range[1] > range[0]) source.want(range[0], range[1]);
    const keep = new Set();
    let before = above.nextSibling;
    let stop = null;
    for (let i = range[0]; i < range[1]; i += 1) {
      const row = source.row(i);
      const key = row ? options.key(row) : "\u0000" + i;
      let entry = nodes.get(key);
      if (!entry || entry.row !== row) {
        const node = make(row, i);
        if (entry) {
          const focused = entry.node === document.activeElement;
          entry.node.replaceWith(node);
          if (before === entry.node) before = node;
          if (focused) stop = node;
        }
        entry = { node, row };
        nodes.set(key, entry);
      }
      keep.add(key);
      entry.node.setAttribute("aria-rowindex", String(i + 2));
      entry.node.tabIndex = key === current ? 0 : -1;
      entry.node.setAttribute("aria-current", String(key === current));
      if (options.selected && row) entry.node.setAttribute("aria-selected", String(Boolean(options.selected(row))));
      if (before === entry.node) before = before.nextSibling;
      else body.insertBefore(entry.node, before);
    }
    for (const [key, entry] of nodes) {
      if (keep.has(key)) continue;
      entry.node.remove();
      nodes.delete(key);
    }
    if (!keep.has(current)) {
      const first = nodes.get(keep.values().next().value);
      if (first && first.row) first.node.tabIndex = 0; // Tab always finds a row
    }
    above.firstChild.style.setProperty("height", range[0] * rowHeight + "px");
    below.firstChild.style.setProperty("height", Math.max(0, total - range[1]) * rowHeight + "px");
    above.hidden = range[0] === 0;
    below.hidden = range[1] >= total;
    table.setAttribute("aria-rowcount", String(source.total() + 1));
    if (stop) stop.focus({ preventScroll: true });
  }
  function reveal(i) {
    const top = body.getBoundingClientRect().top + i * rowHeight;
    const high = 48 + 32 + 8;
    const low = window.innerHeight - rowHeight - 8 - (options.bottom ? options.bottom() : 0);
    if (top < high) window.scrollBy(0, top - high);
    else if (top > low) window.scrollBy(0, top - low);
    draw(false);
  }
  function focus(key) {
    mark(key);
    const entry = nodes.get(key);
    if (entry && document.activeElement !== entry.node) entry.node.focus({ preventScroll: true });
  }
  function goTo(i) {
    const total = size();
    if (!total) return false;
    place = Math.min(total - 1, Math.max(0, i));
    reveal(place);
    const row = source.row(place);
    if (row) focus(options.key(row));
    else {
      current = null;
      waiting = place;
    }
    return true;
  }
  let waiting = null;
  const scrolled = () => draw(false);
  window.addEventListener("scroll", scrolled, { passive: true });
  window.addEventListener("resize", scrolled, { passive: true });
  const watch = new ResizeObserver(scrolled);
  watch.observe(table);
  paintHeads();
  return {
    root: box,
    /** Draws again what the source holds now. */
    refresh() {
      const index = current === null ? -1 : source.find(current);
      if (index >= 0) place = index;
      draw(true);
      if (waiting !== null && source.row(waiting)) {
        const row = source.row(waiting);
        waiting = null;
        focus(options.key(row));
      }
    },
    /** Draws again after rows came or went above: the row with the focus, else the first one in sight, stays where it is. */
    grew() {
      const rows = [...nodes.values()].map((entry) => entry.node).filter((node) => node.isConnected);
      const inside = rows.find((node) => node === document.activeElement);
      const passed = body.getBoundingClientRect().top < 48;
      const anchor = inside || (passed ? rows.find((node) => node.getBoundingClientRect().top >= 80) : null);
      const before = anchor ? anchor.getBoundingClientRect().top : 0;
      this.refresh();
      if (anchor && anchor.isConnected) window.scrollBy(0, anchor.getBoundingClientRect().top - before);
    },
    move: (by) => goTo(current === null ? 0 : place + by),
    goTo,
    focusKey(key) {
      const i = source.find(key);
      if (i < 0) return false;
      return goTo(i);
    },
    /** Brings the current row into sight, above what covers the bottom of the window. */
    reveal() {
      if (current !== null) reveal(place);
    },
    current() {
      const entry = nodes.get(current);
      return entry ? entry.row : null;
    },
    mark,
    open(event) {
      const entry = nodes.get(current);
      if (!entry || !entry.row) return false;
      options.onOpen(entry.row, event);
      return true;
    },
    clear() {
      current = null;
      waiting = null;
      place = 0;
    },
    destroy() {
      window.removeEventListener("scroll", scrolled);
      window.removeEventListener("resize", scrolled);
      watch.disconnect();
    },
  };
}

/** A source of rows that are all here: rows.set(list) changes them. */
export function heldRows(key) {
  let rows = [];
  return {
    set(list) {
      rows = list;
    },
    total: () => rows.length,
    row: (i) => rows[i] || null,
    want: () => {},
    find: (rowKey) => rows.findIndex((row) => key(row) === rowKey),
  };
}

/**
 * A source of rows that the server holds, asked for a hundred at a time: fetchPage(offset, limit, snapshot) -> {snapshot, total, rows}.
 * The order is the one of the first answer, until `restart`. onRows() hears of rows that came, onError(error) of failure.
 */
export function pagedRows(key, fetchPage, onRows, onError) {
  const size = 100;
  let pages = new Map();
  let places = new Map();
  let total = 0;
  let snapshot = null;
  let turn = 0;

  function place(at, answer) {
    snapshot = answer.snapshot;
    total = answer.total;
    pages.set(at, answer.rows);
    answer.rows.forEach((row, i) => places.set(key(row), at * size + i));
    onRows(answer);
  }
  async function load(at) {
    const mine = turn;
    pages.set(at, null);
    try {
      const answer = await fetchPage(at * size, size, snapshot);
      if (mine === turn) place(at, answer);
    } catch (error) {
      if (mine !== turn) return;
      pages.delete(at);
      if (error.status === 404 || error.status === 410) await restart(); // the server let the order go
      else onError(error);
    }
  }
  // The rows that are here stay until others have come: a filter that cannot be read takes nothing away.
  async function restart() {
    const mine = (turn += 1);
    try {
      const answer = await fetchPage(0, size, null);
      if (mine !== turn) return;
      pages = new Map();
      places = new Map();
      place(0, answer);
    } catch (error) {
      if (mine === turn) onError(error);
    }
  }
  return {
    restart,
    total: () => total,
    row(i) {
      const page = pages.get(Math.floor(i / size));
      return page ? page[i % size] || null : null;
    },
    want(from, to) {
      for (let at = Math.floor(from / size); at <= Math.floor((to - 1) / size); at += 1) if (!pages.has(at)) load(at);
    },
    find: (rowKey) => (places.has(rowKey) ? places.get(rowKey) : -1),
    /** Puts another object in the place of a row: the table draws it anew. */
    replace(rowKey, row) {
      const i = places.get(rowKey);
      const page = i === undefined ? null : pages.get(Math.floor(i / size));
      if (page) page[i % size] = row;
    },
  };
}

/** A line under a table: parts that are set, and a spring between left and right. */
export function tableFoot(left, right) {
  return el("div", { class: "table-foot" }, left, el("span", { class: "spring" }), right);
}
