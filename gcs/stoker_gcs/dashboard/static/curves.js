// Curves over the steps of a training run: the mean as a line, from least to greatest as a band.

import { h } from "./dom.js";
import { absolute, clock, NOTHING, number } from "./format.js";

const WIDTH = 600;
const HEIGHT = 160;
const LEAST_DRAG = 4;

/**
 * A value: of JSON's numbers, or `nan`, `inf`, `-inf`, for which it has none.
 *
 * @typedef {number | "nan" | "inf" | "-inf" | null} Value
 * @typedef {{step: number[], at_s: number[], mean: Value[], min: Value[], max: Value[], nans: number[]}} Curve
 */

const rounded = new Intl.NumberFormat("en-US", { maximumSignificantDigits: 5 });
const WORDS = { nan: "NaN", inf: "∞", "-inf": "−∞" };

/** @param {Value} value @returns {string} `0.00512`, `3.2e-5`, `12,345`, `NaN` */
export function figure(value) {
  if (value === null || value === undefined) return NOTHING;
  if (typeof value === "string") return WORDS[value];
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-4 || size >= 1e9) ? value.toExponential(3) : rounded.format(value);
}

/** @param {number} value */
const roughly = (value) => figure(Number(value.toPrecision(3)));

/**
 * @param {object} options
 * @param {string} options.label
 * @param {Curve} options.curve
 * @param {Value} options.newest
 * @param {boolean} options.byTime Over the time instead of the steps.
 * @param {boolean} options.log
 * @param {[number, number]} options.steps The first and the last step that are shown.
 * @param {(first: number | null, last: number | null) => void} options.zoom Asks for other steps; null: all.
 */
export function curveChart({ label, curve, newest, byTime, log, steps, zoom }) {
  const plot = plotOf(curve, { byTime, log, steps });
  const nans = curve.nans.reduce((sum, one) => sum + one, 0);
  const odd = [nans > 0 && `${number(nans)} NaN`, plot.infinite > 0 && `${number(plot.infinite)} infinite`, plot.left > 0 && `${number(plot.left)} not above 0`].filter(Boolean);
  return h("figure", { class: "chart curve", key: label },
    h("figcaption", null, h("span", null, label),
      odd.length > 0 && h("span", { class: "odd", key: "odd" }, odd.join(", ")),
      h("span", { class: "legend", key: "newest" }, "newest ", h("b", null, figure(newest)))),
    h("div", { class: "curve-body", key: "body" },
      h("div", { class: "scale", "aria-hidden": "true" }, h("span", null, roughly(plot.top)), h("span", null, roughly(plot.bottom))),
      h("svg", {
        viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
        preserveAspectRatio: "none",
        role: "img",
        tabindex: "0",
        "aria-label": `${label}: newest ${figure(newest)}, from ${figure(plot.low)} to ${figure(plot.high)}${odd.length ? `, ${odd.join(", ")}` : ""}`,
        onpointerdown: (event) => hold(event),
        onpointermove: (event) => move(event, curve, plot),
        onpointerup: (event) => release(event, plot, zoom),
        onpointerleave: (event) => mark(event.currentTarget, null, curve, plot),
        onkeydown: (event) => key(event, curve, plot, steps, zoom),
      },
      h("line", { class: "grid", x1: 0, x2: WIDTH, y1: HEIGHT / 2, y2: HEIGHT / 2 }),
      h("path", { key: "band", class: "band", d: plot.band }),
      h("path", { key: "mean", class: "mean", d: plot.line }),
      plot.nans.map((x) => h("line", { key: `nan ${x}`, class: "nan", x1: x, x2: x, y1: 0, y2: HEIGHT })),
      h("rect", { key: "chosen", class: "chosen", x: 0, y: 0, width: 0, height: HEIGHT }),
      h("line", { key: "cursor", class: "cursor", y1: 0, y2: HEIGHT, x1: -10, x2: -10 }))),
    h("div", { class: "axis" },
      h("span", null, byTime ? clock(plot.from) : number(plot.from)),
      h("output", { "aria-live": "polite", mount: () => undefined }),
      h("span", null, byTime ? clock(plot.to) : number(plot.to))));
}

/** Where everything lies in the drawing. */
function plotOf(curve, { byTime, log, steps }) {
  const at = byTime ? curve.at_s : curve.step;
  const from = byTime ? at[0] ?? 0 : steps[0];
  const to = byTime ? at[at.length - 1] ?? 1 : steps[1];
  const shown = (value) => typeof value === "number" && (!log || value > 0);
  const known = [...curve.min, ...curve.max, ...curve.mean].filter(shown);
  const low = known.length ? known.reduce((least, one) => Math.min(least, one)) : 0;
  const high = known.length ? known.reduce((most, one) => Math.max(most, one)) : 1;
  const scale = log ? Math.log10 : (value) => value;
  const raise = log ? (value) => 10 ** value : (value) => value;
  const room = (scale(high) - scale(low)) * 0.05 || Math.abs(scale(high)) * 0.05 || 1;
  const [bottom, top] = [scale(low) - room, scale(high) + room];
  const x = (index) => (to > from ? ((at[index] - from) / (to - from)) * WIDTH : WIDTH / 2);
  const y = (value) => {
    if (value === "inf") return 0;
    if (value === "-inf") return HEIGHT;
    return shown(value) ? HEIGHT - ((scale(value) - bottom) / (top - bottom)) * HEIGHT : null;
  };
  const infinite = curve.max.filter((value, index) => value === "inf" || curve.min[index] === "-inf").length;
  const left = log ? curve.min.filter((value) => typeof value === "number" && value <= 0).length : 0;
  return {
    from, to, low, high, infinite, left, x,
    bottom: raise(bottom),
    top: raise(top),
    step: (at_x) => stepAt(curve, byTime, from + (at_x / WIDTH) * (to - from)),
    band: bandOf(curve, x, y),
    line: lineOf(curve, x, y),
    nans: curve.nans.flatMap((count, index) => (count ? [Number(x(index).toFixed(1))] : [])),
  };
}

function stepAt(curve, byTime, value) {
  if (!byTime) return Math.round(value);
  const index = curve.at_s.findIndex((at_s) => at_s >= value);
  return curve.step[index < 0 ? curve.step.length - 1 : index];
}

/** The means as lines; where there is none, as between NaNs, the line has a gap. One alone is a dot. */
function lineOf(curve, x, y) {
  let path = "";
  let drawn = 0;
  curve.mean.forEach((value, index) => {
    const at = y(value);
    if (at === null) {
      if (drawn === 1) path += "h0.01";
      drawn = 0;
      return;
    }
    path += `${drawn ? "L" : "M"}${x(index).toFixed(1)},${at.toFixed(1)}`;
    drawn += 1;
  });
  return drawn === 1 ? `${path}h0.01` : path;
}

function bandOf(curve, x, y) {
  const parts = [];
  let upper = [];
  let lower = [];
  const close = () => {
    if (upper.length > 1) parts.push(`M${upper.join("L")}L${lower.reverse().join("L")}Z`);
    [upper, lower] = [[], []];
  };
  curve.max.forEach((value, index) => {
    const [high, low] = [y(value), y(curve.min[index])];
    if (high === null) return close();
    upper.push(`${x(index).toFixed(1)},${high.toFixed(1)}`);
    lower.push(`${x(index).toFixed(1)},${(low ?? HEIGHT).toFixed(1)}`);
    return undefined;
  });
  close();
  return parts.join("");
}

const xOf = (event) => {
  const box = event.currentTarget.getBoundingClientRect();
  return Math.min(WIDTH, Math.max(0, ((event.clientX - box.left) / box.width) * WIDTH));
};

function hold(event) {
  event.currentTarget.dataset.from = String(xOf(event));
  event.currentTarget.setPointerCapture(event.pointerId);
}

function move(event, curve, plot) {
  const svg = event.currentTarget;
  const x = xOf(event);
  mark(svg, nearest(curve, plot, x), curve, plot);
  if (svg.dataset.from === undefined) return;
  const from = Number(svg.dataset.from);
  choose(svg, Math.min(from, x), Math.abs(x - from));
}

function release(event, plot, zoom) {
  const svg = event.currentTarget;
  const from = Number(svg.dataset.from ?? NaN);
  const x = xOf(event);
  delete svg.dataset.from;
  choose(svg, 0, 0);
  if (Math.abs(x - from) >= LEAST_DRAG) zoom(plot.step(Math.min(from, x)), plot.step(Math.max(from, x)));
}

function choose(svg, x, width) {
  const chosen = svg.querySelector(".chosen");
  chosen.setAttribute("x", x);
  chosen.setAttribute("width", width);
}

function key(event, curve, plot, steps, zoom) {
  const svg = event.currentTarget;
  const count = curve.step.length;
  const at = Number(svg.dataset.at ?? count);
  const quarter = Math.max(1, Math.round((steps[1] - steps[0]) / 4));
  const acts = {
    ArrowLeft: () => mark(svg, Math.max(0, at - 1), curve, plot),
    ArrowRight: () => mark(svg, Math.min(count - 1, at + 1), curve, plot),
    "+": () => zoom(steps[0] + quarter, steps[1] - quarter),
    "=": () => zoom(steps[0] + quarter, steps[1] - quarter),
    "-": () => zoom(Math.max(0, steps[0] - 2 * quarter), steps[1] + 2 * quarter),
    0: () => zoom(null, null),
  };
  if (!acts[event.key] || !count) return;
  acts[event.key]();
  event.preventDefault();
  event.stopPropagation();
}

function nearest(curve, plot, x) {
  let found = null;
  curve.step.forEach((_, index) => {
    if (found === null || Math.abs(plot.x(index) - x) < Math.abs(plot.x(found) - x)) found = index;
  });
  return found;
}

/** Put the cursor at a point and say what it is; null takes it away. */
function mark(svg, index, curve, plot) {
  const x = index === null ? -10 : plot.x(index);
  const cursor = svg.querySelector(".cursor");
  cursor.setAttribute("x1", x);
  cursor.setAttribute("x2", x);
  svg.closest("figure").querySelector("output").textContent = index === null ? "" : words(curve, index);
  if (index === null) delete svg.dataset.at;
  else svg.dataset.at = String(index);
}

function words(curve, index) {
  const [mean, min, max] = [curve.mean[index], curve.min[index], curve.max[index]];
  const values = [];
  if (mean !== null) values.push(figure(mean));
  if (max !== null && (min !== max || mean === null)) values.push(`${figure(min)} to ${figure(max)}`);
  if (curve.nans[index]) values.push(curve.nans[index] > 1 ? `${number(curve.nans[index])} NaN` : "NaN");
  return `step ${number(curve.step[index])} · ${values.join(" · ")} · ${absolute(curve.at_s[index])}`;
}
