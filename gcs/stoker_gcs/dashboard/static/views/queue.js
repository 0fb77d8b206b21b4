// One queue: what it has, lends and borrows, and who waits in it.

import { get, path } from "../api.js";
import { record } from "../data.js";
import { h } from "../dom.js";
import { duration, number, percent, resources } from "../format.js";
import { to } from "../router.js";
import { table } from "../table.js";
import { badge, empty, facts, heading, idLink, message, panel } from "../ui.js";

export const queue = {
  title: ({ id }) => id,
  topics: ["queue.", "job.", "actor.", "tasks"],
  past: true,
  async load(context) {
    const [one, told] = await Promise.all([
      record("queues", context.id, context),
      context.at ? null : get(path`/v1/queues/${context.id}/explain`, {}, context.signal),
    ]);
    return { record: one, told };
  },
  draw({ record: one, told }) {
    return [
      heading(one.name, badge(one.stopped ? "STOPPED" : "ACTIVE"), h("span", { class: "muted" }, "queue")),
      told && panel("Standing", [
        message(told.summary),
        told.remedy && h("p", { class: "remedy" }, h("b", null, "What helps: "), told.remedy),
        told.limits.length > 0 && h("ul", null, told.limits.map((limit) => h("li", null, limit))),
        facts([
          ["share of the cluster", percent(told.usage.share)],
          ["can claim", told.usage.entitled > 0 && percent(told.usage.entitled)],
          ["has", resources(told.usage.used)],
          ["borrows", resources(told.borrowed)],
          ["lends", resources(told.lent)],
          ["leases", number(told.usage.leases)],
        ]),
      ]),
      panel("Settings", facts([
        ["below", one.parent && h("a", { href: to(["queues", one.parent]) }, one.parent)],
        ["weight", number(one.weight)],
        ["quota", resources(one.quota)],
        ["limit", resources(one.limit)],
        ["limit of a user", resources(one.user_limit)],
        ["limit of a job", resources(one.job_limit)],
        ["starts per second and user", one.rate_limit > 0 && number(one.rate_limit)],
        ["order", one.policy || "priority"],
        ["nodes", one.node_filter],
      ])),
      told && panel(`What waits (${number(told.waiting_count)})`, table({
        label: "What waits",
        rows: told.waiting,
        key: (each) => each.request_id,
        empty: empty("Nothing waits in this queue."),
        columns: [
          { title: "position", cell: (each) => number(each.position), numeric: true },
          { title: "name", cell: (each) => idLink(each.job_id, each.name), head: true },
          { title: "user", cell: (each) => each.user },
          { title: "asks for", cell: (each) => resources(each.resources) },
          { title: "count", cell: (each) => number(each.count), numeric: true },
          { title: "priority", cell: (each) => number(each.priority), numeric: true },
          { title: "waits", cell: (each) => duration(each.waited_s), numeric: true },
          { title: "held by", cell: (each) => each.held, wide: true },
        ],
      }), { key: "waiting" }),
    ];
  },
};
