// api.js: requests of the pages, answered by the server or by the data of an exported file.
// Invariant: pages do not depend on which; data missing in an exported file rejects with "not in this file".

import { decodeFrame } from "./frame.js";

/** A failed request: `status` is the HTTP status (0: no response). */
export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

const apiCache = new Map(); // uid -> trajectory, oldest use first
const apiCacheSize = 200;
const apiMaxUids = 64;
let apiBundle = null;

function apiQuery(path, params) {
  const pairs = [];
  for (const [name, value] of Object.entries(params || {})) {
    for (const item of Array.isArray(value) ? value : [value]) {
      if (item !== null && item !== undefined && item !== "") pairs.push([name, String(item)]);
    }
  }
  pairs.sort((a, b) => (a[0] < b[0] ? -1 : a[0] > b[0] ? 1 : 0));
  const text = new URLSearchParams(pairs).toString();
  return text ? path + "?" + text : path;
}

async function apiFetch(path, options) {
  let response;
  try {
    // Relative to the page, which may be mounted under a path of another server.
    response = await fetch(path.slice(1), { credentials: "same-origin", cache: "no-cache", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The viewer's server does not respond. Is it still running?", 0);
  }
  if (response.ok) return response;
  let message = "the server answered " + response.status;
  try {
    message = (await response.json()).error || message;
  } catch {
    // not JSON: only the status is known
  }
  throw new ApiError(message, response.status);
}

function apiBytes(base64) {
  const raw = atob(base64);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i += 1) bytes[i] = raw.charCodeAt(i);
  return bytes;
}

function apiRemember(trajectory) {
  apiCache.delete(trajectory.uid);
  apiCache.set(trajectory.uid, trajectory);
  while (apiCache.size > apiCacheSize && !apiBundle) apiCache.delete(apiCache.keys().next().value);
}

// A list inside a single file, which holds all its rows: sorted and cut here. `sort`: a column, "-" before it for the largest first.
function apiList({ view, sort, filter, offset, limit }) {
  const list = apiBundle.responses["/api/list?view=" + (view || "samples")];
  if (filter) throw new ApiError("An exported file cannot be filtered.", 400);
  if (!list) throw new ApiError("not in this file", 404);
  const rows = structuredClone(list.rows);
  if (sort) {
    const name = sort.replace(/^-/, "");
    const way = sort.startsWith("-") ? -1 : 1;
    const rank = (value) => (value === null || value === undefined ? 1 : 0); // missing values come last in both directions
    rows.sort((a, b) => rank(a[name]) - rank(b[name]) || (a[name] < b[name] ? -way : a[name] > b[name] ? way : 0));
  }
  const from = offset || 0;
  return { snapshot: "file", total: rows.length, offset: from, milliseconds: null, rows: rows.slice(from, from + (limit || 100)) };
}

export const api = {
  isStatic: false,
  start: "",

  /** Reads the bundle of a single file where the page holds one. */
  async open() {
    const holder = document.getElementById("bundle");
    if (!holder) return;
    api.isStatic = true;
    const packed = new Blob([apiBytes(holder.textContent.trim())]);
    const text = await new Response(packed.stream().pipeThrough(new DecompressionStream("gzip"))).text();
    apiBundle = JSON.parse(text);
    api.start = apiBundle.start || "";
    if (apiBundle.frame) for (const trajectory of decodeFrame(apiBytes(apiBundle.frame).buffer)) apiRemember(trajectory);
  },

  /** Exchanges the token of the printed URL for a cookie. */
  async session(token) {
    await apiFetch("/api/session", { method: "POST", headers: { Authorization: "Bearer " + token, "X-Rollbook": "1", "Content-Type": "application/json" }, body: "{}" });
  },

  /** GET, as JSON. params: {name: value or list of values}; empty ones are left out. */
  async json(path, params, signal) {
    const key = apiQuery(path, params);
    if (api.isStatic) {
      if (path === "/api/list") return apiList(params);
      if (!Object.hasOwn(apiBundle.responses, key)) throw new ApiError("not in this file", 404);
      return structuredClone(apiBundle.responses[key]);
    }
    return (await apiFetch(key, { signal })).json();
  },

  /** POST of a JSON body, as JSON. */
  async post(path, body, signal) {
    if (api.isStatic) throw new ApiError("not in this file", 404);
    const headers = { "Content-Type": "application/json", "X-Rollbook": "1" };
    return (await apiFetch(path, { method: "POST", headers, body: JSON.stringify(body), signal })).json();
  },

  /** POST whose answer is a file: {blob, name}. */
  async file(path, body) {
    if (api.isStatic) throw new ApiError("not in this file", 404);
    const headers = { "Content-Type": "application/json", "X-Rollbook": "1" };
    const response = await apiFetch(path, { method: "POST", headers, body: JSON.stringify(body) });
    const name = /filename="([A-Za-z0-9._-]+)"/.exec(response.headers.get("Content-Disposition") || "");
    return { blob: await response.blob(), name: name ? name[1] : "rollbook.html" };
  },

  /** The trajectories of these uids, decoded, in this order; the last 200 are kept. */
  async frame(uids, signal) {
    const trajectories = new Map();
    for (const uid of uids) if (apiCache.has(uid)) trajectories.set(uid, apiCache.get(uid));
    const missing = [...new Set(uids)].filter((uid) => !trajectories.has(uid));
    if (missing.length && api.isStatic) throw new ApiError("not in this file", 404);
    for (let at = 0; at < missing.length; at += apiMaxUids) {
      const path = apiQuery("/api/frame", { uid: missing.slice(at, at + apiMaxUids) });
      const answer = await apiFetch(path, { signal });
      for (const trajectory of decodeFrame(await answer.arrayBuffer())) trajectories.set(trajectory.uid, trajectory);
    }
    return uids.map((uid) => {
      const trajectory = trajectories.get(uid);
      if (!trajectory) throw new ApiError("unknown sample " + uid, 404);
      apiRemember(trajectory);
      return trajectory;
    });
  },

  /** Where an image is: a path of the server, or the data inside a single file ("" where it was left out). */
  mediaUrl(sha256) {
    if (!/^[0-9a-f]{64}$/.test(sha256)) return "";
    if (!api.isStatic) return "api/media/" + sha256;
    const data = (apiBundle.media || {})[sha256] || "";
    return data.startsWith("data:image/") ? data : "";
  },

  /**
   * Calls back with {cursor, records, measured, steps: [changed] or null (unknown)} when more has come; returns a function
   * that stops it. `status` hears "live", "waiting" or "polling". A hidden tab lets its connection go: browsers allow six
   * to a host, and a seventh tab would wait for ever.
   */
  live(callback, status) {
    if (api.isStatic) return () => {};
    const report = status || (() => {});
    let source = null;
    let timer = 0;
    let seen = null;
    let stopped = false;

    function tell(change) {
      if (stopped || change.cursor === seen) return;
      seen = change.cursor;
      callback(change);
    }
    async function ask() {
      try {
        const run = await api.json("/api/run");
        const first = seen === null;
        if (first) seen = run.cursor;
        else tell({ cursor: run.cursor, records: run.records, measured: run.progress ? run.progress.measured : run.records, steps: null });
        return true;
      } catch {
        return false;
      }
    }
    async function poll() {
      report((await ask()) ? "polling" : "waiting");
      if (!stopped && !document.hidden) timer = setTimeout(poll, 3000);
    }
    function connect() {
      if (typeof EventSource === "undefined") {
        poll();
        return;
      }
      source = new EventSource("api/events");
      source.addEventListener("open", () => report("live"));
      source.addEventListener("change", (event) => {
        report("live");
        tell(JSON.parse(event.data));
      });
      source.addEventListener("error", () => {
        report("waiting");
        if (source && source.readyState === EventSource.CLOSED) {
          source = null;
          timer = setTimeout(poll, 3000);
        }
      });
    }
    function disconnect() {
      clearTimeout(timer);
      if (source) source.close();
      source = null;
    }
    function flip() {
      disconnect();
      if (!document.hidden && !stopped) {
        if (seen !== null) ask();
        connect();
      }
    }
    document.addEventListener("visibilitychange", flip);
    ask().then(() => {
      if (!stopped && !document.hidden && !source) connect();
    });
    return () => {
      stopped = true;
      document.removeEventListener("visibilitychange", flip);
      disconnect();
    };
  },
};
