// Small pieces that the views are made of.

import { h } from "./dom.js";
import { NOTHING, number } from "./format.js";
import { here, place, to } from "./router.js";

const GOOD = new Set(["ALIVE", "SUCCEEDED", "FINISHED", "CREATED", "READY"]);
const BUSY = new Set(["RUNNING", "LEASED", "ACTIVE"]);
const WAITS = new Set(["PENDING", "WAITING", "QUEUED", "RESTARTING", "RESCHEDULING", "SUSPECT", "CREATING", "STARTING", "DRAINING", "CORDONED", "PAUSED"]);
const BAD = new Set(["FAILED", "DEAD", "LOST"]);
const MARKS = { good: "✓", busy: "▶", waits: "…", bad: "✕", idle: "○" };

/** @param {string} state @returns {"good" | "busy" | "waits" | "bad" | "idle"} */
export function toneOf(state) {
  if (GOOD.has(state)) return "good";
  if (BUSY.has(state)) return "busy";
  if (WAITS.has(state)) return "waits";
  return BAD.has(state) ? "bad" : "idle";
}

/** A state by word, mark and colour. @param {string} state @param {string} [title] */
export function badge(state, title = undefined) {
  const tone = toneOf(state);
  return h("span", { class: `badge ${tone}`, title }, h("span", { "aria-hidden": "true" }, MARKS[tone]), state);
}

/** How many are in which state. @param {Record<string, number>} counts */
export function counts(counts) {
  const given = Object.entries(counts ?? {}).filter(([, count]) => count);
  if (!given.length) return h("span", { class: "muted" }, "none");
  return h("span", { class: "counts" }, given.map(([state, count]) =>
    h("span", { class: `count ${toneOf(state)}`, key: state }, h("b", null, number(count)), " ", state.toLowerCase())));
}

const KINDS = { n: "nodes", job: "jobs", a: "actors", t: "tasks", pg: "groups" };

/** The address of what an id names, or null. @param {string} id @returns {string | null} */
export function addressOf(id) {
  const kind = KINDS[id.slice(0, id.indexOf("_"))];
  return kind ? to([kind, id]) : null;
}

/** An id, as a link if there is a view of it. @param {string} id @param {string} [text] */
export function idLink(id, text = undefined) {
  if (!id) return NOTHING;
  const address = addressOf(id);
  const shown = text || id;
  return address ? h("a", { href: address, class: text ? undefined : "id", title: id }, shown) : h("span", { class: "id" }, shown);
}

const IDS = /\b(?:job|n|a|t|pg)_[0-9a-f]{8,}(?:\.\d+)?\b/g;

/** A text with the ids in it as links. @param {string} text */
export function linked(text) {
  const parts = [];
  let last = 0;
  for (const found of text.matchAll(IDS)) {
    parts.push(text.slice(last, found.index), idLink(found[0]));
    last = found.index + found[0].length;
  }
  return [...parts, text.slice(last)];
}

/** A message: its first line stands out, the others follow as they are. @param {string} text */
export function message(text) {
  const [first, ...rest] = (text ?? "").split("\n");
  return h("div", { class: "message" },
    h("strong", null, linked(first)),
    rest.length > 0 && h("pre", null, linked(rest.join("\n").trim())));
}

/** The first line of a text, the whole of it as the title. @param {string} text */
export function brief(text) {
  const line = (text ?? "").split("\n", 1)[0];
  return h("span", { class: "brief", title: text }, line);
}

/** @param {{message: string, status?: number}} problem */
export function problemBox(problem) {
  return h("div", { class: "problem", role: "alert" }, message(problem.message));
}

/** @param {string} title @param {any} content @param {{key?: string, aside?: any}} [options] */
export function panel(title, content, { key = title, aside = undefined } = {}) {
  return h("section", { class: "panel", key }, h("header", null, h("h2", null, title), aside), content);
}

/** What to do where there is nothing. @param {string} text @param {string} [command] */
export function empty(text, command = undefined) {
  return h("p", { class: "empty" }, text, command && [": ", h("code", null, command)]);
}

const LONG = 50;

/** Names with values; those without a value are left out. @param {any[][]} rows */
export function facts(rows) {
  const given = rows.filter(([, value]) => value !== undefined && value !== null && value !== "" && value !== false);
  return h("dl", { class: "facts" }, given.map(([name, value]) =>
    h("div", { key: name, class: typeof value === "string" && value.length > LONG ? "long" : undefined }, h("dt", null, name), h("dd", null, value))));
}

/**
 * Tabs whose choice is in the address.
 *
 * @param {string[][]} tabs Their names in the address, and their titles; the first is shown by default.
 * @param {string} shown
 */
export function tabs(tabs, shown) {
  const cleared = { cursor: "", from: "", state: "" };
  return h("nav", { class: "tabs", "aria-label": "Parts" }, tabs.map(([name, title], index) =>
    h("a", {
      key: name,
      href: here({ ...cleared, tab: index ? name : "" }),
      "aria-current": name === shown ? "page" : undefined,
    }, title)));
}

/** The title of a view, what it is about, and what can be done. @param {any} title @param {...any} more */
export function heading(title, ...more) {
  return h("header", { class: "heading", key: "heading" }, h("h1", null, title), more);
}

/** Choices of one thing, in the address. @param {string} name @param {string[][]} choices */
export function choices(label, name, choices) {
  const chosen = place().query[name] ?? "";
  return h("span", { class: "choices", role: "group", "aria-label": label }, choices.map(([value, text]) =>
    h("a", {
      key: value,
      href: here({ [name]: value, cursor: "", from: "" }),
      "aria-current": value === chosen ? "true" : undefined,
    }, text)));
}

/** The same as buttons, of what is no other place but another look at this one. @param {string} name @param {string[][]} choices */
export function toggles(label, name, choices) {
  const chosen = place().query[name] ?? "";
  return h("span", { class: "choices", role: "group", "aria-label": label }, choices.map(([value, text]) =>
    h("button", {
      key: value,
      type: "button",
      "aria-pressed": String(value === chosen),
      onclick: () => { location.hash = here({ [name]: value }); },
    }, text)));
}

/**
 * A field whose text is in the address once it is confirmed.
 *
 * @param {string} label
 * @param {string} name
 * @param {{placeholder?: string}} [options]
 */
export function filterField(label, name, { placeholder = "" } = {}) {
  return h("label", { class: "filter", key: `filter ${name}` }, label, h("input", {
    type: "search",
    value: place().query[name] ?? "",
    placeholder,
    spellcheck: "false",
    autocomplete: "off",
    onchange: (event) => { location.hash = here({ [name]: event.target.value.trim(), cursor: "", from: "" }); },
  }));
}

/** A button of something that one may not do is shown with the reason, and does nothing. */
export function button(text, { onclick, refused = "", tone = "", title = undefined }) {
  return h("button", {
    type: "button",
    key: text,
    class: tone,
    "aria-disabled": refused ? "true" : undefined,
    title: refused || title,
    onclick: refused ? null : onclick,
  }, text);
}

/** How much of something is used: a bar with its numbers. */
export function meter(label, used, total, text) {
  const fraction = total ? Math.min(1, Math.max(0, used / total)) : 0;
  return h("div", { class: label ? "meter" : "meter bare", key: label },
    label && h("span", { class: "meter-label" }, label),
    h("span", { class: "bar", role: "img", "aria-label": `${label || "used"}: ${Math.round(fraction * 100)} %` },
      h("span", { class: fraction > 0.9 ? "fill high" : "fill", style: { width: `${fraction * 100}%` } })),
    h("span", { class: "meter-text" }, text));
}
