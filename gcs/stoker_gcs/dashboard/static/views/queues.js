// Queues: how the cluster is shared among tenants.

import { all } from "../api.js";
import { attempt, records } from "../data.js";
import { h } from "../dom.js";
import { duration, number, percent, resources } from "../format.js";
import { to } from "../router.js";
import { table } from "../table.js";
import { badge, empty, heading, idLink, meter, panel, problemBox } from "../ui.js";

export const queues = {
  title: () => "Queues",
  topics: ["queue.", "job.", "actor.", "tasks"],
  past: true,
  async load(context) {
    const { at, signal } = context;
    const [page, usage, waiting] = await Promise.all([
      records("queues", { limit: 1000 }, context),
      at ? null : attempt(all("/v1/queue-usage", {}, signal)),
      at ? null : attempt(all("/v1/queue", {}, signal, 1000)),
    ]);
    return { page, usage, waiting };
  },
  draw({ page, usage, waiting }) {
    const used = new Map((usage?.items ?? []).map((one) => [one.name, one]));
    return [
      heading("Queues"),
      usage?.problem && problemBox(usage.problem),
      queueTable(inOrder(withUsed(page.items, used)), used),
      waiting && panel("What waits, in order", waiting.problem ? problemBox(waiting.problem) : waitingTable(waiting.items)),
    ];
  },
};

/** The queues that were made, and those that are there without: a default one. */
function withUsed(queues, used) {
  const names = new Set(queues.map((queue) => queue.name));
  const others = [...used.keys()].filter((name) => !names.has(name));
  return [...others.map((name) => ({ name, parent: "", weight: 1, quota: {}, limit: {}, stopped: false })), ...queues];
}

/** Each queue below its parent, with how deep it is. */
function inOrder(queues) {
  const names = new Set(queues.map((queue) => queue.name));
  const below = (parent, depth) => queues
    .filter((queue) => (names.has(queue.parent) ? queue.parent : "") === parent)
    .flatMap((queue) => [{ queue, depth }, ...below(queue.name, depth + 1)]);
  return below("", 0);
}

function queueTable(rows, used) {
  const of = (row) => used.get(row.queue.name);
  return table({
    label: "Queues",
    rows,
    key: ({ queue }) => queue.name,
    columns: [
      { title: "queue", cell: ({ queue, depth }) => h("a", { href: to(["queues", queue.name]), style: { "margin-left": `${depth * 16}px` } }, queue.name), head: true },
      { title: "state", cell: ({ queue }) => badge(queue.stopped ? "STOPPED" : "ACTIVE") },
      { title: "weight", cell: ({ queue }) => number(queue.weight), numeric: true },
      { title: "share of the cluster", cell: (row) => of(row) && shareBar(of(row)) },
      { title: "has", cell: (row) => of(row) && resources(of(row).used) },
      { title: "quota", cell: ({ queue }) => resources(queue.quota) },
      { title: "limit", cell: ({ queue }) => resources(queue.limit) },
      { title: "waiting", cell: (row) => of(row) && number(of(row).waiting), numeric: true },
      { title: "held by", cell: (row) => of(row)?.held, wide: true },
    ],
  });
}

function shareBar({ share, entitled }) {
  return meter("", share, 1, `${percent(share)}${entitled ? ` of ${percent(entitled)}` : ""}`);
}

function waitingTable(rows) {
  return table({
    label: "What waits",
    rows,
    key: (one) => one.request_id,
    empty: empty("Nothing waits."),
    columns: [
      { title: "name", cell: (one) => idLink(one.group_id || one.job_id, one.name), head: true },
      { title: "job", cell: (one) => idLink(one.job_id) },
      { title: "asks for", cell: (one) => resources(one.resources) },
      { title: "count", cell: (one) => number(one.count), numeric: true },
      { title: "position", cell: (one) => number(one.position), numeric: true },
      { title: "waits", cell: (one) => duration(one.waiting_s), numeric: true },
      { title: "fits", cell: (one) => (one.infeasible ? "fits on no node" : ""), wide: true },
    ],
  });
}
