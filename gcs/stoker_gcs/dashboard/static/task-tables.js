// Tables of tasks: of functions by their attempts, and of attempts.

import { hours } from "./cost.js";
import { h } from "./dom.js";
import { ago, bytes, duration, NOTHING, number, running } from "./format.js";
import { to } from "./router.js";
import { table } from "./table.js";
import { badge, brief, counts, empty, idLink } from "./ui.js";

const SUBMIT = "stoker job submit -- python train.py";

/** Functions, with how their attempts went. @param {any[]} rows @param {string} [job_id] Of which job alone. */
export function functionTable(rows, job_id = "") {
  const some = (what) => rows.some((one) => one[what]);
  const known = (times, name) => (times?.count ? duration(times[name]) : NOTHING);
  return table({
    label: "Tasks by function",
    rows,
    key: (one) => one.key,
    empty: empty("No tasks yet", SUBMIT),
    columns: [
      { title: "function", cell: (one) => h("a", { href: to(["functions", one.key], { job_id }) }, one.key || "(no name)"), head: true, wide: true },
      { title: "attempts", cell: (one) => number(one.count), numeric: true },
      { title: "states", cell: (one) => counts(one.states) },
      { title: "ran: median", cell: (one) => known(one.run_s, "p50"), numeric: true },
      { title: "90 %", cell: (one) => known(one.run_s, "p90"), numeric: true },
      { title: "longest", cell: (one) => known(one.run_s, "max"), numeric: true },
      { title: "in all", cell: (one) => known(one.run_s, "total"), numeric: true },
      { title: "waited: median", cell: (one) => known(one.wait_s, "p50"), numeric: true },
      { title: "90 %", cell: (one) => known(one.wait_s, "p90"), numeric: true },
      ...(some("gpu_s") ? [{ title: "GPU-h", cell: (one) => (one.gpu_s ? hours(one.gpu_s) : ""), numeric: true }] : []),
      ...(some("cpu_s") ? [{ title: "CPU-h", cell: (one) => (one.cpu_s ? hours(one.cpu_s) : ""), numeric: true }] : []),
      { title: "failures", cell: (one) => causes(one, job_id) },
    ],
  });
}

function causes(one, job_id) {
  return Object.entries(one.failures).map(([code, count]) => h("a", {
    key: code, class: "cause", href: to(["functions", one.key], { job_id, state: "FAILED" }),
  }, h("code", null, code), ` ${number(count)} `));
}

/** @param {any[]} rows Attempts. @param {{named?: boolean, past?: boolean}} [options] */
export function attemptTable(rows, { named = true, past = false } = {}) {
  return table({
    label: "Attempts",
    rows,
    key: (one) => `${one.task_id} ${one.attempt}`,
    sorted: past ? "" : "created desc",
    empty: empty("No attempt is so."),
    columns: [
      { title: "task", cell: (one) => h("a", { href: attemptAddress(one), class: named ? "" : "id" }, named ? one.name : one.task_id), head: true },
      { title: "attempt", cell: (one) => number(one.attempt), numeric: true },
      { title: "state", cell: (one) => badge(one.state) },
      { title: "submitted", cell: (one) => ago(one.submitted_at_s), sort: past ? undefined : "created" },
      { title: "waited", cell: (one) => waitedFor(one), numeric: true },
      { title: "ran", cell: (one) => ranFor(one), numeric: true },
      { title: "node", cell: (one) => idLink(one.node_id) },
      { title: "result", cell: (one) => (one.result_nbytes ? bytes(one.result_nbytes) : ""), numeric: true },
      { title: "cause", cell: (one) => brief(one.error ? `${one.error.code}: ${one.error.message}` : one.waiting_for), wide: true },
    ],
  });
}

/** @param {any} one An attempt. */
export function attemptAddress(one) {
  return to(["tasks", one.task_id], { attempt: one.attempt || "" });
}

function waitedFor(one) {
  if (!one.submitted_at_s) return NOTHING;
  if (one.started_at_s) return duration(one.started_at_s - one.submitted_at_s);
  return one.ended_at_s ? duration(one.ended_at_s - one.submitted_at_s) : running(one.submitted_at_s);
}

function ranFor(one) {
  if (!one.started_at_s) return NOTHING;
  return one.ended_at_s ? duration(one.ended_at_s - one.started_at_s) : running(one.started_at_s);
}
