// One function: how its attempts went, and each of them.

import { get } from "../api.js";
import { attempt, records } from "../data.js";
import { h } from "../dom.js";
import { to } from "../router.js";
import { listQuery, pager } from "../table.js";
import { attemptTable, functionTable } from "../task-tables.js";
import { choices, filterField, heading, panel } from "../ui.js";

const STATES = [["", "all"], ["WAITING,QUEUED", "waiting"], ["RUNNING", "running"], ["FINISHED", "finished"], ["FAILED", "failed"], ["CANCELLED", "cancelled"]];

export const functionView = {
  title: ({ id }) => id,
  topics: ["tasks"],
  pause_ms: 1000,
  async load(context) {
    const { id, query, signal } = context;
    const filters = { name: id, job_id: query.job_id };
    const [page, summary] = await Promise.all([
      records("tasks", listQuery({ sort: "created", order: "desc", state: query.state, ...filters }), context),
      attempt(get("/v1/tasks/summary", filters, signal)),
    ]);
    return { page, summary };
  },
  draw({ page, summary }, { id, query }) {
    const own = summary.items?.filter((one) => one.key === id) ?? [];
    return [
      heading(id, h("span", { class: "muted" }, "function"), h("span", { class: "buttons" },
        h("a", { class: "button", href: to(["tasks"], { job_id: query.job_id }) }, "all functions"))),
      own.length > 0 && panel("In all", functionTable(own, query.job_id)),
      h("div", { class: "filters", key: "filters" }, choices("State", "state", STATES), filterField("job", "job_id")),
      attemptTable(page.items, { named: false }),
      pager(page),
    ];
  },
};
