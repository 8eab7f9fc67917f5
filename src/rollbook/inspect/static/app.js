// app.js: routing, header, keyboard shortcuts and live updates.
// Invariant: the URL hash contains the whole state of a page; opening it again shows the same page.

import { ago, count, debounce, el, empty, icon, plural, visible } from "./dom.js";
import { api } from "./api.js";
import { setGlobalKeys, setPageKeys, showKeys } from "./keys.js";

const appPages = new Map();
const appScroll = new Map(); // URL hash -> scroll position
const appThemes = ["system", "light", "dark"];
const appThemeIcons = { system: "system", light: "sun", dark: "moon" };

const appLiveSeconds = 300;

let appRun = null;
let appRunTime = 0; // time at which appRun was fetched
let appConnection = "live"; // or "waiting": the server does not respond
let appOpen = null; // {context, page, hash}
let appTurn = 0; // increases with every navigation, so that late answers are discarded
let appParts = null; // nodes of the header

/** Registers a page: `open(context)` fills context.root and returns {title, keys, crumbs, ready (a promise that resolves
    when its height is final), live(change), close()}. */
export function registerPage(name, open) {
  appPages.set(name, open);
}

// ---- addresses

/** "#/step/137?sort=-reward" -> {path: ["step", "137"], params: Map}. */
export function parseHash(hash) {
  const text = hash.replace(/^#\/?/, "");
  const at = text.indexOf("?");
  const params = new Map(at < 0 ? [] : new URLSearchParams(text.slice(at + 1)));
  const path = (at < 0 ? text : text.slice(0, at)).split("/").filter(Boolean).map((part) => {
    try {
      return decodeURIComponent(part);
    } catch {
      return part;
    }
  });
  return { path, params };
}

/** The URL hash of a page: link("step", 137, {sort: "-reward"}) -> "#/step/137?sort=-reward". */
export function link(...path) {
  const last = path[path.length - 1];
  const params = last !== null && typeof last === "object" ? path.pop() : {};
  const pairs = Object.entries(params instanceof Map ? Object.fromEntries(params) : params)
    .filter(([, value]) => value !== null && value !== undefined && value !== "" && value !== false)
    .map(([name, value]) => encodeURIComponent(name) + "=" + encodeURIComponent(value === true ? "1" : String(value)));
  return "#/" + path.map((part) => encodeURIComponent(String(part))).join("/") + (pairs.length ? "?" + pairs.join("&") : "");
}

function appGo(hash, options) {
  const target = hash.startsWith("#") ? hash : "#" + hash;
  if (target === location.hash) {
    appRoute(false);
    return;
  }
  appScroll.set(location.hash, window.scrollY);
  if (options && options.replace) {
    history.replaceState(null, "", target);
    appRoute(false);
  } else {
    history.pushState(null, "", target);
    appRoute(false);
  }
}

// ---- preferences: theme, palette, stars

function appRead(name, fallback) {
  try {
    return localStorage.getItem("rollbook." + name) || fallback;
  } catch {
    return fallback; // a file:// page may have no storage
  }
}

function appWrite(name, value) {
  try {
    localStorage.setItem("rollbook." + name, value);
  } catch {
    // only the preference is lost
  }
}

// Default: the theme chosen at export, else the system's.
function appTheme() {
  return appRead("theme", document.documentElement.dataset.given || "system");
}

function appApplyTheme() {
  const root = document.documentElement;
  const theme = appTheme();
  if (theme === "system") delete root.dataset.theme;
  else root.dataset.theme = theme === "dark" ? "dark" : "light";
  root.dataset.palette = appRead("palette", "default") === "safe" ? "safe" : "default";
  document.dispatchEvent(new Event("themechange"));
}

function appCycleTheme() {
  const next = appThemes[(appThemes.indexOf(appTheme()) + 1) % appThemes.length];
  appWrite("theme", next);
  appApplyTheme();
  appPaintButtons();
  appAnnounce("theme: " + next);
}

function appCyclePalette() {
  const next = appRead("palette", "default") === "safe" ? "default" : "safe";
  appWrite("palette", next);
  appApplyTheme();
  appPaintButtons();
  appAnnounce(next === "safe" ? "color-blind-safe palette" : "default palette");
}

function appPaintButtons() {
  if (!appParts) return;
  const theme = appTheme();
  const safe = appRead("palette", "default") === "safe";
  empty(appParts.theme, icon(appThemeIcons[theme]));
  appParts.theme.setAttribute("aria-label", "Theme: " + theme);
  appParts.theme.title = "Theme: " + theme + " (t)";
  empty(appParts.palette, icon("palette"));
  appParts.palette.setAttribute("aria-pressed", String(safe));
  appParts.palette.title = (safe ? "Palette: color-blind safe" : "Palette: default") + " (c)";
}

// Stars are stored in the browser; with --annotate, stars of samples are also saved with the run.
function appStars() {
  const key = "stars." + (appRun ? appRun.name : "");
  const starred = new Set(JSON.parse(appRead(key, "[]")));
  for (const [uid, entry] of appNotes) {
    if (entry.star) starred.add(uid);
    else starred.delete(uid);
  }
  return {
    has: (id) => starred.has(id),
    count: () => starred.size,
    all: () => [...starred],
    /** `uid`: the starred sample, or null for a group. */
    toggle(id, uid = null) {
      if (starred.has(id)) starred.delete(id);
      else starred.add(id);
      appWrite(key, JSON.stringify([...starred]));
      if (uid !== null && appRun.features.annotate) appAnnotate(uid, { star: starred.has(id) }).catch((error) => appToast(error.message));
      return starred.has(id);
    },
  };
}

const appNotes = new Map(); // uid -> {star, note, time}, where the viewer was started with --annotate

async function appAnnotate(uid, change) {
  appNotes.set(uid, await api.post("/api/annotate", { uid, ...change }));
}

async function appReadNotes() {
  if (!appRun.features || !appRun.features.annotate) return;
  for (const [uid, entry] of Object.entries(await api.json("/api/annotations"))) appNotes.set(uid, entry);
}

// ---- messages

function appAnnounce(text) {
  if (!appParts) return;
  appParts.announcer.textContent = appParts.announcer.textContent === text ? text + "\u00a0" : text;
}

function appToast(text) {
  const note = el("div", { class: "toast", text: visible(text) });
  appParts.toasts.append(note);
  setTimeout(() => note.remove(), 4000);
}

function appRememberHash(hash) {
  try {
    if (hash) sessionStorage.setItem("rollbook.asked", hash);
    else sessionStorage.removeItem("rollbook.asked");
  } catch {
    // without storage the overview is shown
  }
}

function appRequestedHash() {
  try {
    return sessionStorage.getItem("rollbook.asked") || "#/";
  } catch {
    return "#/";
  }
}

function appHome() {
  return api.isStatic && api.start ? api.start : link();
}

function appFailure(error, retry) {
  const missing = error.status === 404;
  return el("section", { class: "panel failure", role: "alert" },
    el("h1", { text: missing ? "Not found" : "This page could not be loaded" }),
    el("p", { text: visible(error.message || String(error)) }),
    el("p", null,
      el("button", { class: "button", type: "button", text: "Try again", on: { click: retry } }), " ",
      el("a", { class: "button", href: appHome(), text: api.isStatic ? "Start" : "Overview" })));
}

// The requested page is opened after the token was given.
function appLocked() {
  document.title = "rollbook: locked";
  if (/^#\/./.test(location.hash)) appRememberHash(location.hash);
  window.addEventListener("hashchange", () => /^#token=/.test(location.hash) && location.reload());
  empty(document.body,
    el("main", { class: "locked" },
      el("section", { class: "panel" },
        icon("lock"),
        el("h1", { text: "Open the URL printed in the terminal" }),
        el("p", { text: "This viewer requires an access token, the part of the URL after “#token=”. Copy the full URL from the terminal running “rollbook view” and open it in this tab." }),
        el("p", { class: "muted", text: "A restarted viewer has a new token." }))));
}

// ---- export

/** Opens the export dialog. `selection`: {uids}, {gid} or {filter}; `description`: the selection in words. */
function appExport(selection, description) {
  const images = el("input", { type: "checkbox", checked: true });
  const redact = el("input", { type: "text", class: "input wide", placeholder: "regular expression, such as [\\w.]+@[\\w.]+", spellcheck: "false", autocomplete: "off" });
  const title = el("input", { type: "text", class: "input wide", placeholder: "rollbook", autocomplete: "off", maxlength: "200" });
  const state = el("p", { class: "muted", role: "status" });
  const save = el("button", { class: "button primary", type: "submit", text: "Save HTML" });
  const box = el("dialog", { class: "dialog", aria: { label: "Export" }, on: { close: () => box.remove() } },
    el("form", { class: "dialog-body", method: "dialog", on: { submit: write } },
      el("div", { class: "dialog-head" }, el("h2", { text: "Export as HTML" })),
      el("p", { text: "Contains " + visible(description) + ": prompts, responses and per-token values. The file needs no server and makes no network requests." }),
      el("label", { class: "field" }, el("span", { text: "Title" }), title),
      el("label", { class: "field" }, el("span", { text: "Redact" }), redact),
      el("label", { class: "check" }, images, "include images"),
      state,
      el("div", { class: "dialog-foot" },
        el("button", { class: "button", type: "button", text: "Cancel", on: { click: () => box.close() } }), save)));
  async function write(event) {
    event.preventDefault();
    save.disabled = true;
    state.textContent = "Writing…";
    try {
      const file = await api.file("/api/export", { ...selection, images: images.checked, redact: redact.value || null, title: title.value || null });
      const url = URL.createObjectURL(file.blob);
      const anchor = el("a", { href: url, download: file.name });
      anchor.click();
      setTimeout(() => URL.revokeObjectURL(url), 60000);
      box.close();
      appToast("saved " + file.name + " (" + (file.blob.size / 1e6).toFixed(1) + " MB)");
    } catch (error) {
      state.textContent = visible(error.message);
      save.disabled = false;
    }
  }
  document.body.append(box);
  box.showModal();
}

// ---- pages

function appContext(hash, turn) {
  const { path, params } = parseHash(hash);
  const root = el("div", { class: "page" });
  const current = () => turn === appTurn;
  const context = {
    root,
    path: path.length ? path : ["overview"],
    run: appRun,
    api,
    link,
    stars: appStars(),
    notes: {
      get: (uid) => (appNotes.get(uid) || {}).note || "",
      set: (uid, note) => appAnnotate(uid, { note }),
    },
    get closed() {
      return !current();
    },
    params: {
      get: (name, fallback) => (params.has(name) ? params.get(name) : fallback),
      all: () => Object.fromEntries(params),
      set(changes, options) {
        for (const [name, value] of Object.entries(changes)) {
          if (value === null || value === undefined || value === "" || value === false) params.delete(name);
          else params.set(name, value === true ? "1" : String(value));
        }
        if (!current()) return;
        const next = link(...path, params);
        if (next === location.hash) return;
        if (options && options.push) history.pushState(null, "", next);
        else history.replaceState(null, "", next);
        appOpen.hash = next;
      },
    },
    go: (target, options) => current() && appGo(target, options),
    announce: (text) => current() && appAnnounce(text),
    toast: (text) => current() && appToast(text),
    crumbs: (list) => current() && appCrumbs(list),
    exportHtml: (selection, description) => appExport(selection, description),
  };
  return context;
}

function appCrumbs(list) {
  appOpen.crumbs = list || [];
  empty(appParts.crumbs, (list || []).map((crumb, i) =>
    el("li", null,
      crumb.href ? el("a", { href: crumb.href, text: visible(crumb.text) })
        : el("span", { aria: { current: i === list.length - 1 ? "page" : null }, text: visible(crumb.text) }))));
}

async function appRoute(restore) {
  const turn = (appTurn += 1);
  if (appOpen && appOpen.page && appOpen.page.close) appOpen.page.close();
  const hash = location.hash || "#/";
  const place = restore ? appScroll.get(hash) : undefined; // read before the page is emptied
  const context = appContext(hash, turn);
  const name = context.path[0];
  const open = appPages.get(name);
  setPageKeys([]);
  appOpen = { context, page: null, hash, crumbs: [] };
  empty(appParts.main, context.root);
  appCrumbs([]);
  for (const item of appParts.nav) item.node.setAttribute("aria-current", item.name === name ? "page" : "false");
  if (!restore) window.scrollTo(0, 0);
  const slow = setTimeout(() => turn === appTurn && appParts.main.setAttribute("aria-busy", "true"), 120);
  try {
    if (!open) throw Object.assign(new Error(api.isStatic ? "the page “" + name + "” is not in this file" : "there is no page “" + name + "”"), { status: 404 });
    const page = (await open(context)) || {};
    if (turn !== appTurn) {
      if (page.close) page.close();
      return;
    }
    appOpen.page = page;
    setPageKeys(page.keys);
    if (page.crumbs) appCrumbs(page.crumbs);
    else if (!appOpen.crumbs.length && name !== "overview") appCrumbs([{ text: page.title || name }]);
    document.title = (page.title && name !== "overview" ? page.title + " · " : "") + visible(appRun.name) + " · rollbook";
    if (turn > 1 && !context.root.contains(document.activeElement)) appParts.main.focus({ preventScroll: true });
    appAnnounce(page.title || name);
    await page.ready;
    if (turn === appTurn && place !== undefined) window.scrollTo(0, place);
  } catch (error) {
    if (turn !== appTurn || error.name === "AbortError") return;
    if (error.status === 401) {
      appLocked();
      return;
    }
    if (!error.status) console.error(error);
    empty(context.root, appFailure(error, () => appRoute(false)));
  } finally {
    clearTimeout(slow);
    if (turn === appTurn) appParts.main.removeAttribute("aria-busy");
  }
}

function appUp() {
  const above = appOpen ? appOpen.crumbs.filter((crumb) => crumb.href) : [];
  if (above.length) appGo(above[above.length - 1].href);
  else if (api.isStatic && location.hash !== api.start) appGo(api.start);
  else if (!api.isStatic && appOpen && appOpen.context.path[0] !== "overview") appGo(link());
  else return false;
  return true;
}

// ---- header

function appFacts() {
  const { steps, progress } = appRun;
  const facts = [];
  if (steps && steps.count) facts.push("step " + steps.last);
  facts.push(plural(appRun.records, "sample"));
  appParts.facts.textContent = facts.join(" · ");
  const reading = progress && progress.total > progress.measured;
  appParts.progress.hidden = !reading;
  if (reading) {
    appParts.progress.textContent = "reading " + Math.floor((100 * progress.measured) / progress.total) + "%";
    appParts.progress.title = count(progress.measured) + " of " + count(progress.total) + " samples indexed";
  }
}

// "live": the run changed recently; "idle": with the time of the last change.
function appStatus(status) {
  if (status) appConnection = status;
  const idle = appRun.idle === null || appRun.idle === undefined ? null : appRun.idle + (performance.now() - appRunTime) / 1000;
  const state = appConnection === "waiting" ? "waiting" : idle !== null && idle < appLiveSeconds ? "live" : "idle";
  const words = {
    waiting: "disconnected from the server, retrying",
    live: "live: new samples appear automatically",
    idle: "last change " + (idle === null ? "unknown" : ago(Date.now() / 1000 - idle)) + "; new samples appear automatically",
  }[state];
  appParts.live.hidden = api.isStatic;
  appParts.live.title = words;
  if (appParts.live.dataset.state === state) return;
  appParts.live.dataset.state = state;
  empty(appParts.live, el("span", { class: "dot" }), el("span", { text: state }), el("span", { class: "sr", text: words }));
}

function appHeader() {
  const searchable = !api.isStatic && appRun.features && appRun.features.search && appPages.has("search");
  const box = el("input", { type: "search", class: "input search", placeholder: "Search text…", aria: { label: "Search prompts and responses", keyshortcuts: "/" }, autocomplete: "off", spellcheck: "false" });
  const search = el("form", { class: "search-form", role: "search", hidden: !searchable, on: { submit: (event) => {
    event.preventDefault();
    if (box.value.trim()) appGo(link("search", { q: box.value.trim() }));
  } } }, icon("search"), box, el("kbd", { text: "/", aria: { hidden: "true" } }));
  const pages = [
    ["overview", "Overview", link(), true],
    ["metrics", "Metrics", link("metrics"), Boolean(appRun.features && appRun.features.ledger)],
    ["samples", "Samples", link("samples"), true],
    ["compare", "Compare", link("compare"), true],
    ["sql", "SQL", link("sql"), Boolean(appRun.features && appRun.features.sql)],
  ];
  const nav = pages
    .filter(([name, , , available]) => available && appPages.has(name) && !api.isStatic)
    .map(([name, text, href]) => ({ name, node: el("a", { href, text }) }));
  const theme = el("button", { class: "icon-button", type: "button", on: { click: appCycleTheme } });
  const palette = el("button", { class: "icon-button", type: "button", aria: { label: "Color-blind-safe palette" }, on: { click: appCyclePalette } });
  const help = el("button", { class: "icon-button", type: "button", title: "Keyboard shortcuts (?)", aria: { label: "Keyboard shortcuts" }, text: "?", on: { click: () => appKeys() } });
  const live = el("span", { class: "live", role: "status" });
  const facts = el("span", { class: "facts" });
  const progress = el("span", { class: "chip", hidden: true });
  const crumbs = el("ol", { class: "crumbs" });
  const main = el("main", { id: "main", tabindex: "-1" });
  const announcer = el("div", { class: "sr", aria: { live: "polite" } });
  const toasts = el("div", { class: "toasts", aria: { live: "polite" } });
  const header = el("header", { class: "top" },
    el("a", { class: "skip", href: "#main", text: "Skip to content", on: { click: (event) => {
      event.preventDefault();
      main.focus();
    } } }),
    el("nav", { class: "where", aria: { label: "Breadcrumb" } },
      el("a", { class: "brand", href: appHome(), title: api.isStatic ? "Start" : "Overview" }, appMark(), el("span", { class: "run-name", text: visible(appRun.name) })),
      crumbs),
    live, facts, progress,
    api.isStatic ? el("span", { class: "chip", text: "saved file", title: "Exported file: a fixed selection of samples" }) : null,
    el("span", { class: "spring" }),
    search,
    nav.length ? el("nav", { class: "pages", aria: { label: "Pages" } }, nav.map((item) => item.node)) : null,
    el("span", { class: "tools" }, palette, theme, help));
  empty(document.body, header, main, announcer, toasts);
  appParts = { header, main, announcer, toasts, crumbs, live, facts, progress, theme, palette, box, searchable, nav };
  appPaintButtons();
}

// The logo: the rewards of a group as bars, best first.
function appMark() {
  const mark = icon("mark");
  mark.classList.add("mark");
  for (const d of ["M5 20V5", "M10 20V9", "M15 20v-6", "M20 20v-2"]) {
    const bar = document.createElementNS("http://www.w3.org/2000/svg", "path");
    bar.setAttribute("d", d);
    mark.append(bar);
  }
  return mark;
}

function appKeys() {
  const page = appOpen && appOpen.page;
  showKeys(page && page.title ? page.title : "This page");
}

function appBindKeys() {
  setGlobalKeys([
    { key: "/", label: appParts.searchable ? "search prompts and responses" : "", run: () => {
      if (!appParts.searchable) return false;
      appParts.box.focus();
      appParts.box.select();
      return true;
    } },
    { key: ":", label: appPages.has("sql") && !api.isStatic ? "SQL" : "", run: () => {
      if (!appPages.has("sql") || api.isStatic) return false;
      appGo(link("sql"));
      return true;
    } },
    { key: "o", label: api.isStatic ? "" : "overview", run: () => (api.isStatic ? false : appGo(link())) },
    { key: "t", label: "switch theme (system, light, dark)", run: appCycleTheme },
    { key: "c", label: "switch palette (default, color-blind safe)", run: appCyclePalette },
    { key: "?", label: "show keyboard shortcuts", run: appKeys },
    { key: "Escape", label: "leave the input, or go one level up", run: appUp },
  ]);
}

// ---- start

function appLive() {
  const facts = debounce(async () => {
    try {
      Object.assign(appRun, await api.json("/api/run"));
      appRunTime = performance.now();
      appFacts();
      appStatus("live");
    } catch {
      // the next change asks again
    }
  }, 300);
  setInterval(() => appStatus(null), 15000);
  api.live((change) => {
    appRun.cursor = change.cursor;
    appRun.records = change.records;
    facts();
    if (appOpen && appOpen.page && appOpen.page.live) appOpen.page.live(change);
  }, appStatus);
}

/** Starts the viewer: exchanges the token, loads the run, and opens the page of the URL. */
export async function startApp() {
  appApplyTheme();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => document.dispatchEvent(new Event("themechange")));
  try {
    await api.open();
    const tokenMatch = /^#token=([^&/]+)(?:&at=(.*))?$/.exec(location.hash);
    if (tokenMatch) {
      const after = tokenMatch[2] ? "#" + decodeURIComponent(tokenMatch[2]).replace(/^#/, "") : appRequestedHash();
      history.replaceState(null, "", location.pathname + location.search + after);
      await api.session(decodeURIComponent(tokenMatch[1]));
    }
    appRun = await api.json("/api/run");
    appRunTime = performance.now();
    appRememberHash(null);
    await appReadNotes();
  } catch (error) {
    if (error.status === 401) appLocked();
    else empty(document.body, el("main", { class: "locked" }, appFailure(error, () => location.reload())));
    return;
  }
  if (api.isStatic && !location.hash && api.start) history.replaceState(null, "", api.start);
  appHeader();
  appFacts();
  appStatus("live");
  appBindKeys();
  history.scrollRestoration = "manual";
  window.addEventListener("scroll", debounce(() => appOpen && appOpen.page && appScroll.set(location.hash, window.scrollY), 100), { passive: true });
  window.addEventListener("popstate", () => {
    const tokenMatch = /^#token=/.test(location.hash);
    if (tokenMatch) location.reload();
    else if (appOpen && location.hash !== appOpen.hash) appRoute(true);
  });
  document.addEventListener("click", (event) => {
    const anchor = event.target.closest ? event.target.closest("a[href^='#/']") : null;
    if (!anchor || event.defaultPrevented || event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
    event.preventDefault();
    appGo(anchor.getAttribute("href"));
  });
  await appRoute(false);
  if (!api.isStatic) appLive();
}
