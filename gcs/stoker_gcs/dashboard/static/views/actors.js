// All actors.

import { records } from "../data.js";
import { h } from "../dom.js";
import { ago, number, resources } from "../format.js";
import { to } from "../router.js";
import { listQuery, pager, table } from "../table.js";
import { badge, brief, choices, empty, filterField, heading, idLink } from "../ui.js";

const STATES = [["", "all"], ["PENDING", "pending"], ["ALIVE", "alive"], ["RESTARTING", "restarting"], ["DEAD", "dead"]];

export const actors = {
  title: () => "Actors",
  topics: ["actor."],
  past: true,
  async load(context) {
    const { query } = context;
    const filters = { state: query.state, job_id: query.job_id, node_id: query.node_id, class_name: query.class_name, name: query.name };
    return { page: await records("actors", listQuery({ sort: "created", order: "desc", ...filters }), context) };
  },
  draw({ page }, { at }) {
    return [
      heading("Actors"),
      h("div", { class: "filters", key: "filters" }, choices("State", "state", STATES), !at && filterField("name", "name"), !at && filterField("class", "class_name"), filterField("job", "job_id")),
      actorTable(page.items),
      pager(page),
    ];
  },
};

/** @param {any[]} rows */
export function actorTable(rows) {
  return table({
    label: "Actors",
    rows,
    key: (actor) => actor.actor_id,
    sorted: "created desc",
    empty: empty("No actors. A class becomes one with @stoker.remote and Class.remote()."),
    columns: [
      { title: "actor", cell: (actor) => h("a", { href: to(["actors", actor.actor_id]), title: actor.actor_id }, actor.name || actor.class_name), head: true },
      { title: "class", cell: (actor) => actor.class_name },
      { title: "state", cell: (actor) => badge(actor.state) },
      { title: "restarts", cell: (actor) => (actor.max_restarts < 0 ? `${number(actor.restarts)} of any number` : `${number(actor.restarts)} of ${number(actor.max_restarts)}`), numeric: true },
      { title: "holds", cell: (actor) => resources(actor.resources) },
      { title: "node", cell: (actor) => idLink(actor.node_id) },
      { title: "job", cell: (actor) => idLink(actor.job_id) },
      { title: "created", cell: (actor) => ago(actor.created_at_s), sort: "created" },
      { title: "why it waits, or died", cell: (actor) => brief(actor.state === "DEAD" || actor.state === "RESTARTING" ? actor.death_cause?.message : actor.pending_reason), wide: true },
    ],
  });
}
