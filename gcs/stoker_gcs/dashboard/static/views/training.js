// What training reports: the runs of jobs, and the curves of one.

import { get, path } from "../api.js";
import { curveChart, figure } from "../curves.js";
import { attempt } from "../data.js";
import { h } from "../dom.js";
import { ago, number } from "../format.js";
import { go, here, place, to } from "../router.js";
import { listQuery, pager, table } from "../table.js";
import { badge, choices, empty, facts, filterField, heading, idLink, message, panel } from "../ui.js";

const DEFAULT_RUN = "default";
const POINTS = 400;
const SCALES = [["", "linear"], ["log", "log"]];
const AXES = [["", "steps"], ["time", "time"]];
const SHOWN_VALUES = 4;

export const trainings = {
  title: () => "Training",
  topics: ["reports"],
  pause_ms: 1000,
  load: ({ query, signal }) => get("/v1/training-runs", listQuery({ job_id: query.job_id }), signal),
  draw(page, { query }) {
    return [
      heading("Training"),
      h("div", { class: "filters", key: "filters" }, filterField("job", "job_id")),
      runTable(page.items, { empty: query.job_id ? empty("This job has reported nothing.") : empty("No run has reported yet", "stoker.train.report(step, loss=loss)") }),
      pager(page),
    ];
  },
};

export const training = {
  title: ({ id }) => `${runName()} of ${id}`,
  topics: ["reports", "job."],
  pause_ms: 1000,
  async load({ id, query, signal }) {
    const steps = { from_step: query.from_step, to_step: query.to_step, points: POINTS };
    const [curves, job] = await Promise.all([
      get(path`/v1/training-runs/${id}/${runName()}`, steps, signal),
      attempt(get(path`/v1/jobs/${id}`, {}, signal)),
    ]);
    return { curves, job };
  },
  draw({ curves, job }, { id, query }) {
    const { run, metrics } = curves;
    const zoomed = query.from_step || query.to_step;
    const looks = {
      byTime: query.x === "time",
      log: query.scale === "log",
      steps: /** @type {[number, number]} */ ([curves.from_step, curves.to_step]),
      zoom: (first, last) => go(here({ from_step: first, to_step: last }), { replace: true }),
    };
    return [
      heading(run.run, job.state && badge(job.state), h("span", { class: "muted" }, "run of ", idLink(id, job.name || id)),
        h("span", { class: "buttons" }, h("a", { class: "button", href: to(["training"], { job_id: id }) }, "all runs"))),
      run.note && h("div", { class: "notice", key: "note" }, message(run.note)),
      h("section", { class: "panel", key: "summary" }, facts([
        ["step", number(run.newest_step)],
        ["steps per second", run.steps_per_s === null ? "not known yet" : figure(run.steps_per_s)],
        ["last report", ago(run.newest_at_s)],
        ["first report", ago(run.first_at_s)],
        ...Object.entries(run.newest).map(([name, value]) => [name, newest(value)]),
      ])),
      h("div", { class: "filters", key: "filters" }, choices("Scale", "scale", SCALES), choices("Over", "x", AXES),
        zoomed && h("a", { class: "button", key: "all", href: here({ from_step: "", to_step: "" }) }, "all steps"),
        h("span", { class: "muted" }, `steps ${number(curves.from_step)} to ${number(curves.to_step)}${curves.steps_per_point > 1 ? `, ${number(curves.steps_per_point)} in a point` : ""}. Drag to zoom; arrows, +, − and 0 work too.`)),
      panel("Curves", h("div", { class: "charts wide-charts" }, Object.entries(metrics).map(([name, curve]) =>
        curveChart({ label: name, curve, newest: run.newest[name], ...looks })))),
    ];
  },
};

const runName = () => place().query.run || DEFAULT_RUN;

function newest(value) {
  return typeof value === "string" ? h("b", { class: "odd" }, figure(/** @type {any} */ (value))) : figure(value);
}

/**
 * Runs as a table.
 *
 * @param {any[]} rows
 * @param {{empty?: any, withJob?: boolean}} [options]
 */
export function runTable(rows, { empty = undefined, withJob = true } = {}) {
  return table({
    label: "Runs",
    rows,
    key: (run) => `${run.job_id} ${run.run}`,
    empty,
    columns: [
      { title: "run", cell: (run) => h("a", { href: to(["training", run.job_id], { run: run.run }) }, run.run), head: true },
      ...(withJob ? [{ title: "job", cell: (run) => idLink(run.job_id) }] : []),
      { title: "step", cell: (run) => number(run.newest_step), numeric: true },
      { title: "steps/s", cell: (run) => figure(run.steps_per_s), numeric: true },
      { title: "last report", cell: (run) => ago(run.newest_at_s) },
      { title: "newest values", cell: (run) => values(run.newest), wide: true },
    ],
  });
}

function values(given) {
  const all = Object.entries(given);
  const more = all.length - SHOWN_VALUES;
  return [all.slice(0, SHOWN_VALUES).map(([name, value]) => h("span", { class: "chip", key: name }, `${name} `, newest(value))), more > 0 && h("span", { class: "muted" }, `and ${number(more)} more`)];
}
