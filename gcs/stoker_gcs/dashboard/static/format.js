// Numbers, sizes, durations and times as people read them.

import { h } from "./dom.js";

const grouped = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const precise = new Intl.NumberFormat("en-US", { maximumFractionDigits: 2 });
export const NOTHING = "–";

/** @param {number | null | undefined} value @returns {string} `12,345`, `0.25` */
export function number(value) {
  if (value === null || value === undefined) return NOTHING;
  return (Number.isInteger(value) || Math.abs(value) >= 100 ? grouped : precise).format(value);
}

/** @param {number | null | undefined} fraction @returns {string} `63 %` */
export function percent(fraction) {
  return fraction === null || fraction === undefined ? NOTHING : `${number(Math.round(fraction * 100))} %`;
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
/** @param {number | null | undefined} value @returns {string} `1.5 GiB` */
export function bytes(value) {
  if (value === null || value === undefined) return NOTHING;
  let unit = 0;
  let left = value;
  while (Math.abs(left) >= 1024 && unit < UNITS.length - 1) {
    left /= 1024;
    unit += 1;
  }
  return `${unit && left < 100 ? left.toFixed(1) : grouped.format(left)} ${UNITS[unit]}`;
}

/** @param {number | null | undefined} seconds @returns {string} `2 h 5 min`, `1.2 s`, `15 ms` */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return NOTHING;
  const s = Math.max(0, seconds);
  if (s === 0) return "0 s";
  if (s < 1e-3) return `${(s * 1e6).toFixed(0)} µs`;
  if (s < 1) return `${(s * 1e3).toFixed(s < 0.01 ? 1 : 0)} ms`;
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 60) return `${Math.floor(s)} s`;
  if (s < 3600) return parts(s / 60, "min", s % 60, "s");
  if (s < 86_400) return parts(s / 3600, "h", (s % 3600) / 60, "min");
  return parts(s / 86_400, "d", (s % 86_400) / 3600, "h");
}

function parts(large, name, small, smallName) {
  const rest = Math.floor(small);
  return rest ? `${Math.floor(large)} ${name} ${rest} ${smallName}` : `${Math.floor(large)} ${name}`;
}

/** @param {number} at_s @returns {string} `2026-05-04 12:00:00` in the reader's time zone */
export function absolute(at_s) {
  const at = new Date(at_s * 1000);
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${clock(at_s)}`;
}

/** @param {number} at_s @param {{millis?: boolean}} [options] @returns {string} `12:00:00` */
export function clock(at_s, { millis = false } = {}) {
  const at = new Date(at_s * 1000);
  const text = `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
  return millis ? `${text}.${String(at.getMilliseconds()).padStart(3, "0")}` : text;
}

const two = (value) => String(value).padStart(2, "0");

/** @param {number | null | undefined} at_s @returns {any} `5 min ago`, which stays right; the title is the time */
export function ago(at_s) {
  if (!at_s) return NOTHING;
  return h("time", { datetime: iso(at_s), title: absolute(at_s), "data-ago": at_s }, since(at_s));
}

let moment_s = null;
/** @param {number | null} at_s What goes on is measured until then: an earlier moment is shown. Null: until now. */
export function freeze(at_s) {
  moment_s = at_s;
}

/** @param {number | null | undefined} at_s @returns {any} `5 min`, the time since, which stays right */
export function running(at_s) {
  if (!at_s) return NOTHING;
  if (moment_s !== null) return duration(moment_s - at_s);
  return h("time", { title: `since ${absolute(at_s)}`, "data-since": at_s }, duration(now() - at_s));
}

/** Bring the relative times of the page up to date. */
export function tick() {
  for (const element of times("ago")) text(element, since(Number(element.dataset.ago)));
  for (const element of times("since")) {
    text(element, duration(now() - Number(element.dataset.since)));
  }
}

/** @param {string} name @returns {NodeListOf<HTMLElement>} */
const times = (name) => document.querySelectorAll(`time[data-${name}]`);

function text(element, wanted) {
  if (element.firstChild && element.textContent !== wanted) element.firstChild.nodeValue = wanted;
}

/** How long ago, in its largest unit: the title has the time itself. */
function since(at_s) {
  const s = now() - at_s;
  if (s < 0) return `in ${duration(Math.ceil(-s))}`;
  if (s < 1) return "just now";
  if (s < 60) return `${Math.floor(s)} s ago`;
  if (s < 3600) return `${Math.floor(s / 60)} min ago`;
  return s < 172_800 ? `${Math.floor(s / 3600)} h ago` : `${Math.floor(s / 86_400)} d ago`;
}

export const now = () => Date.now() / 1000;
const iso = (at_s) => new Date(at_s * 1000).toISOString();

/** @param {string} name @param {number} amount @returns {string} An amount of a resource: `2 GPU`, `3 GiB memory` */
export function amount(name, amount) {
  return name === "memory" ? `${bytes(amount)} memory` : `${number(amount)} ${name}`;
}

/** @param {Record<string, number> | null | undefined} resources @returns {string} `4 CPU, 1 GPU` */
export function resources(resources) {
  const parts = Object.entries(resources ?? {}).filter(([, value]) => value);
  return parts.length ? parts.map(([name, value]) => amount(name, value)).join(", ") : "none";
}
