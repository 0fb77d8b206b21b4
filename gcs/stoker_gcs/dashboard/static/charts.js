// Drawings of numbers: lines and areas over time in SVG, bars, and where a time went.

import { h } from "./dom.js";
import { absolute, clock, duration } from "./format.js";

const WIDTH = 600;
const HEIGHT = 96;

/**
 * Values over time. `null` is a gap.
 *
 * @param {object} options
 * @param {string} options.label
 * @param {number[]} options.at_s
 * @param {Array<{name: string, values: Array<number | null>, look: string}>} options.lines A look is a class of the
 *   style sheet: `area` is filled, `limit` is a thin line, `second` another one.
 * @param {(value: number | null) => string} options.format
 */
export function timeChart({ label, at_s, lines, format }) {
  const known = lines.flatMap((line) => line.values.filter((value) => value !== null));
  const top = Math.max(...known, 1e-9) * 1.05;
  const x = (index) => (at_s.length > 1 ? (index / (at_s.length - 1)) * WIDTH : 0);
  const y = (value) => HEIGHT - (value / top) * HEIGHT;
  const latest = lines.map((line) => `${line.name} ${format(last(line.values))}`).join(", ");
  return h("figure", { class: "chart", key: label },
    h("figcaption", null, h("span", null, label), lines.map((line) =>
      h("span", { class: `legend ${line.look}`, key: line.name }, line.name, " ", h("b", null, format(last(line.values)))))),
    h("svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": `${label}: ${latest}`,
      onpointermove: (event) => point(event, at_s, lines, format),
      onpointerleave: (event) => unpoint(event),
    },
    h("line", { class: "grid", x1: 0, x2: WIDTH, y1: HEIGHT / 2, y2: HEIGHT / 2 }),
    lines.map((line) => h("path", { key: line.name, class: line.look, d: outline(line, x, y) })),
    h("line", { class: "cursor", y1: 0, y2: HEIGHT, x1: -10, x2: -10 })),
    h("div", { class: "axis" },
      h("span", null, when(at_s, 0)),
      h("output", { "aria-live": "off", mount: () => undefined }),
      h("span", null, when(at_s, at_s.length - 1))));
}

const DAY_S = 86_400;

/** A time of the axis, with its day where there are several. */
function when(at_s, index) {
  if (!at_s.length) return "";
  return at_s[at_s.length - 1] - at_s[0] > DAY_S / 2 ? absolute(at_s[index]) : clock(at_s[index]);
}

function last(values) {
  for (let index = values.length - 1; index >= 0; index -= 1) if (values[index] !== null) return values[index];
  return null;
}

function outline(line, x, y) {
  const parts = [];
  for (const [from, to] of stretches(line.values)) {
    const points = line.values.slice(from, to).map((value, index) => `${x(from + index).toFixed(1)},${y(value).toFixed(1)}`);
    if (line.look === "area") parts.push(`M${x(from).toFixed(1)},${HEIGHT}L${points.join("L")}L${x(to - 1).toFixed(1)},${HEIGHT}Z`);
    else parts.push(`M${points.join("L")}`);
  }
  return parts.join("");
}

function stretches(values) {
  const found = [];
  let from = -1;
  values.forEach((value, index) => {
    if (value !== null && from < 0) from = index;
    if (value === null && from >= 0) {
      found.push([from, index]);
      from = -1;
    }
  });
  if (from >= 0) found.push([from, values.length]);
  return found;
}

function point(event, at_s, lines, format) {
  const box = event.currentTarget.getBoundingClientRect();
  const index = Math.round(((event.clientX - box.left) / box.width) * (at_s.length - 1));
  if (index < 0 || index >= at_s.length) return;
  const cursor = event.currentTarget.querySelector(".cursor");
  const x = (index / Math.max(1, at_s.length - 1)) * WIDTH;
  cursor.setAttribute("x1", x);
  cursor.setAttribute("x2", x);
  const values = lines.map((line) => `${line.name} ${format(line.values[index])}`).join(" · ");
  event.currentTarget.parentElement.querySelector("output").textContent = `${when(at_s, index)} · ${values}`;
}

function unpoint(event) {
  const cursor = event.currentTarget.querySelector(".cursor");
  cursor.setAttribute("x1", -10);
  cursor.setAttribute("x2", -10);
  event.currentTarget.parentElement.querySelector("output").textContent = "";
}

/**
 * Parts of a whole as one bar, each with its length in words.
 *
 * @param {string} label
 * @param {Array<{name: string, value: number, look: string}>} parts
 * @param {(value: number) => string} [format]
 */
export function partsBar(label, parts, format = duration) {
  const whole = parts.reduce((sum, part) => sum + part.value, 0) || 1;
  const shown = parts.filter((part) => part.value > 0);
  return h("div", { class: "parts", key: label },
    h("div", { class: "parts-bar", role: "img", "aria-label": `${label}: ${shown.map((part) => `${part.name} ${format(part.value)}`).join(", ")}` },
      shown.map((part) => h("span", { key: part.name, class: part.look, title: `${part.name} ${format(part.value)}`, style: { width: `${(part.value / whole) * 100}%` } }))),
    h("div", { class: "parts-legend", "aria-hidden": "true" },
      shown.map((part) => h("span", { key: part.name, class: `legend ${part.look}` }, part.name, " ", h("b", null, format(part.value))))));
}
