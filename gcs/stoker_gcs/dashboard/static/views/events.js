// The event log: all that the cluster has decided, newest first.

import { get } from "../api.js";
import { h } from "../dom.js";
import { absolute, ago, number } from "../format.js";
import { here, to } from "../router.js";
import { pager, table } from "../table.js";
import { brief, choices, empty, filterField, heading, idLink } from "../ui.js";

const KINDS = [["", "all"], ["job.", "jobs"], ["actor.", "actors"], ["node.,gpu.", "nodes"], ["placement_group.", "groups"], ["queue.", "queues"],
  ["worker.", "workers"], ["environment.", "environments"], ["token.,secret.,audit.", "audit"], ["leader.", "leaders"]];

export const events = {
  title: () => "Events",
  topics: [""],
  async load({ query, signal }) {
    const { kind, subject, by, cursor } = query;
    return get("/v1/events", { kind, subject, by, cursor, order: "desc", limit: 100, count: true }, signal);
  },
  draw(page) {
    return [
      heading("Events"),
      h("div", { class: "filters", key: "filters" }, choices("Kind", "kind", KINDS), filterField("kind", "kind"), filterField("subject", "subject"), filterField("by", "by")),
      table({
        label: "Events",
        rows: page.items,
        key: (event) => event.seq,
        empty: page.next_cursor ? empty("None of the newest is so; see the next page.") : empty("No event is so."),
        columns: [
          { title: "number", cell: (event) => momentLink(event), numeric: true },
          { title: "when", cell: (event) => ago(event.at_s) },
          { title: "kind", cell: (event) => h("code", null, event.kind), head: true },
          { title: "subject", cell: (event) => [idLink(event.subject), " ", h("a", { class: "muted", href: here({ subject: event.subject, cursor: "", from: "" }), "aria-label": `Only events of ${event.subject}`, title: "Only these" }, "⌕")] },
          { title: "by", cell: (event) => event.by?.name },
          { title: "what it is then", cell: (event) => details(event), wide: true },
        ],
      }),
      pager(page),
    ];
  },
};

/** A moment to look at: the cluster after this event. */
function momentLink(event) {
  return h("a", { href: to([], { at: event.seq }), title: `The cluster as it was then, ${absolute(event.at_s)}` }, number(event.seq));
}

const TELLING = ["state", "name", "class_name", "entrypoint", "hostname", "reason", "pending_reason", "cause", "message", "holder", "role", "exit_code"];

function details(event) {
  const payload = event.payload ?? {};
  const told = TELLING.map((name) => payload[name]).filter((value) => value !== undefined && value !== null && value !== "");
  const death = payload.death_cause?.message;
  return h("details", null,
    h("summary", null, brief([...told, death].filter(Boolean).join(" · ") || "payload")),
    h("pre", null, JSON.stringify(payload, null, 2)));
}
