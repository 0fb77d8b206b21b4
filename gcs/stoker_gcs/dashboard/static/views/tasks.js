// Tasks, by function: how many are in which state, how long they ran and waited, and why they failed.

import { get } from "../api.js";
import { records } from "../data.js";
import { h } from "../dom.js";
import { number } from "../format.js";
import { listQuery, pager } from "../table.js";
import { attemptTable, functionTable } from "../task-tables.js";
import { choices, counts, filterField, heading } from "../ui.js";

const GROUPS = [["", "by function"], ["none", "each"]];
const STATES = [["", "all"], ["WAITING,QUEUED", "waiting"], ["RUNNING", "running"], ["FINISHED", "finished"], ["FAILED", "failed"], ["CANCELLED", "cancelled"]];
const FUNCTIONS = 200;

export const tasks = {
  title: () => "Tasks",
  topics: ["tasks"],
  pause_ms: 1000,
  past: true,
  async load(context) {
    const { query, signal, at } = context;
    const filters = { job_id: query.job_id, name: query.name };
    if (!at && query.by !== "none") return { summary: await get("/v1/tasks/summary", { ...filters, limit: FUNCTIONS }, signal) };
    const more = { state: query.state, node_id: query.node_id, actor_id: query.actor_id };
    return { page: await records("tasks", listQuery({ sort: "created", order: "desc", ...filters, ...more }), context) };
  },
  draw({ summary, page }, { query, at }) {
    return [
      heading("Tasks", summary && counts(summary.states)),
      h("div", { class: "filters", key: "filters" },
        !at && choices("Group", "by", GROUPS),
        page && choices("State", "state", STATES),
        filterField("job", "job_id"), !at && filterField("function", "name"), page && filterField("node", "node_id")),
      summary ? functionTable(summary.items, query.job_id) : attemptTable(page.items, { past: Boolean(at) }),
      summary?.total > summary?.items.length && h("p", { class: "muted", key: "more" },
        `${number(summary.items.length)} of ${number(summary.total)} functions: those with the most attempts.`),
      page && pager(page),
    ];
  },
};
