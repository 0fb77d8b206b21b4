// All jobs, and the schedules that submit them.

import { all } from "../api.js";
import { attempt, records } from "../data.js";
import { h } from "../dom.js";
import { ago, duration, NOTHING, running } from "../format.js";
import { to } from "../router.js";
import { listQuery, pager, table } from "../table.js";
import { badge, brief, choices, empty, filterField, heading, panel, problemBox, tabs } from "../ui.js";

const TABS = [["jobs", "Jobs"], ["schedules", "Schedules"]];
const STATES = [["", "all"], ["PENDING", "pending"], ["RUNNING", "running"], ["SUCCEEDED", "succeeded"], ["FAILED", "failed"], ["STOPPED", "stopped"]];

export const jobs = {
  title: () => "Jobs",
  topics: ["job.", "schedule."],
  past: true,
  async load(context) {
    const { query, signal, at } = context;
    if (query.tab === "schedules" && !at) return { schedules: await attempt(all("/v1/schedules", {}, signal)) };
    const filters = { state: query.state, namespace: query.namespace, schedule: query.schedule };
    return { page: await records("jobs", listQuery({ sort: "created", order: "desc", ...filters }), context) };
  },
  draw({ page, schedules }, { query, at }) {
    return [
      heading("Jobs", !at && tabs(TABS, schedules ? "schedules" : "jobs")),
      page && h("div", { class: "filters", key: "filters" }, choices("State", "state", STATES), filterField("namespace", "namespace"), filterField("schedule", "schedule")),
      page && jobTable(page.items, query),
      page && pager(page),
      schedules && panel("Schedules", schedules.problem ? problemBox(schedules.problem) : scheduleTable(schedules.items)),
    ];
  },
};

function jobTable(rows, query) {
  return table({
    label: "Jobs",
    rows,
    key: (job) => job.job_id,
    sorted: "created desc",
    empty: query.state || query.namespace || query.schedule ? empty("No job is so.") : empty("No jobs yet", "stoker job submit -- python train.py"),
    columns: [
      { title: "job", cell: (job) => h("a", { href: to(["jobs", job.job_id]) }, job.name || job.job_id), head: true },
      { title: "state", cell: (job) => badge(job.state, job.message) },
      { title: "attempt", cell: (job) => (job.attempt > 1 ? `${job.attempt} of ${job.retries + 1}` : job.retries ? `1 of ${job.retries + 1}` : ""), numeric: true },
      { title: "user", cell: (job) => job.user },
      { title: "queue", cell: (job) => h("a", { href: to(["queues", job.queue]) }, job.queue) },
      { title: "created", cell: (job) => ago(job.created_at_s), sort: "created" },
      { title: "ran", cell: (job) => ranFor(job), numeric: true },
      { title: "what it is, or how it ended", cell: (job) => brief(job.message || job.entrypoint), wide: true },
    ],
  });
}

/** How long a job ran, or runs. @param {any} job */
export function ranFor(job) {
  if (!job.started_at_s) return NOTHING;
  return job.ended_at_s ? duration(job.ended_at_s - job.started_at_s) : running(job.started_at_s);
}

function scheduleTable(rows) {
  return table({
    label: "Schedules",
    rows,
    key: (one) => one.name,
    empty: empty("No schedules yet", "stoker schedule create nightly --cron '0 3 * * *' -- python train.py"),
    columns: [
      { title: "schedule", cell: (one) => h("a", { href: to(["jobs"], { schedule: one.name }) }, one.name), head: true },
      { title: "state", cell: (one) => badge(one.paused ? "PAUSED" : "ACTIVE") },
      { title: "cron", cell: (one) => h("code", null, one.cron) },
      { title: "next", cell: (one) => ago(one.next_at_s) },
      { title: "user", cell: (one) => one.user },
      { title: "entrypoint", cell: (one) => brief(one.job?.entrypoint), wide: true },
    ],
  });
}
