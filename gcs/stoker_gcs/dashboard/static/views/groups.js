// All placement groups: resources that are reserved together.

import { records } from "../data.js";
import { h } from "../dom.js";
import { ago, number, resources } from "../format.js";
import { to } from "../router.js";
import { listQuery, pager, table } from "../table.js";
import { badge, brief, choices, empty, filterField, heading, idLink } from "../ui.js";

const STATES = [["", "all"], ["PENDING", "pending"], ["CREATED", "created"], ["RESCHEDULING", "rescheduling"], ["REMOVED", "removed"]];

export const groups = {
  title: () => "Placement groups",
  topics: ["placement_group."],
  past: true,
  async load(context) {
    const { query } = context;
    const filters = { state: query.state, job_id: query.job_id, name: query.name };
    return { page: await records("placement_groups", listQuery({ sort: "created", order: "desc", ...filters }), context) };
  },
  draw({ page }, { at }) {
    return [
      heading("Placement groups"),
      h("div", { class: "filters", key: "filters" }, choices("State", "state", STATES), !at && filterField("name", "name"), filterField("job", "job_id")),
      table({
        label: "Placement groups",
        rows: page.items,
        key: (group) => group.group_id,
        sorted: "created desc",
        empty: empty("No placement groups. One is reserved by", "stoker placement-group create"),
        columns: [
          { title: "group", cell: (group) => h("a", { href: to(["groups", group.group_id]) }, group.name || group.group_id), head: true },
          { title: "state", cell: (group) => badge(group.state) },
          { title: "strategy", cell: (group) => group.strategy },
          { title: "bundles", cell: (group) => number(group.bundles.length), numeric: true },
          { title: "reserved", cell: (group) => number(Object.keys(group.placements).length), numeric: true },
          { title: "in all", cell: (group) => resources(sumOf(group.bundles)) },
          { title: "job", cell: (group) => idLink(group.job_id) },
          { title: "created", cell: (group) => ago(group.created_at_s), sort: "created" },
          { title: "why it waits", cell: (group) => brief(group.reason), wide: true },
        ],
      }),
      pager(page),
    ];
  },
};

/** @param {any[]} bundles @returns {Record<string, number>} */
export function sumOf(bundles) {
  const sum = {};
  for (const bundle of bundles) {
    for (const [name, value] of Object.entries(bundle.resources)) sum[name] = (sum[name] ?? 0) + value;
  }
  return sum;
}
