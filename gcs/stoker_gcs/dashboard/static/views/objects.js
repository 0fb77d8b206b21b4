// Objects in the nodes' shared memory, and the detached ones: who holds how much.

import { all } from "../api.js";
import { attempt, records } from "../data.js";
import { h } from "../dom.js";
import { ago, bytes, number } from "../format.js";
import { here, to } from "../router.js";
import { table } from "../table.js";
import { badge, brief, choices, empty, filterField, heading, idLink, meter, panel, problemBox } from "../ui.js";

const GROUPS = [["", "by job"], ["node_id", "by node"], ["owner_id", "by owner"]];
const SHOWN = 100;

export const objects = {
  title: () => "Objects and memory",
  topics: ["object.", "tasks", "node."],
  past: true,
  async load(context) {
    const { query, at, signal } = context;
    if (at) return { detached: await records("detached_objects", { limit: 1000 }, context) };
    const filters = { node_id: query.node_id, job_id: query.job_id };
    const [shared, detached, nodes] = await Promise.all([
      attempt(all("/v1/objects", filters, signal)),
      attempt(all("/v1/detached-objects", { job_id: query.job_id }, signal)),
      attempt(all("/v1/nodes", { state: "ALIVE,SUSPECT" }, signal)),
    ]);
    return { shared, detached, nodes };
  },
  draw({ shared, detached, nodes }, { query }) {
    return [
      heading("Objects and memory"),
      nodes && panel("Memory of nodes", nodes.problem ? problemBox(nodes.problem) : nodeMemory(nodes.items)),
      shared && panel("In shared memory", shared.problem ? problemBox(shared.problem) : [
        h("div", { class: "filters" }, choices("Group", "by", GROUPS), filterField("job", "job_id"), filterField("node", "node_id")),
        shared.more && h("p", { class: "notice" }, "There are more objects than were counted here: the first ", number(shared.items.length), "."),
        grouped(shared.items, query.by || "job_id"),
        h("h3", null, "The largest"),
        largest(shared.items),
      ]),
      panel("Detached", detached.problem ? problemBox(detached.problem) : detachedTable(detached.items)),
    ];
  },
};

function nodeMemory(nodes) {
  return nodes.map((node) => {
    const { memory_bytes, object_bytes, spilled_bytes } = node.usage;
    const total = node.resources.memory;
    return h("div", { key: node.node_id },
      meter(node.hostname, memory_bytes ?? 0, total, `${bytes(memory_bytes)} in use, ${bytes(object_bytes)} of it objects${spilled_bytes ? `, ${bytes(spilled_bytes)} spilled` : ""}`));
  });
}

function grouped(items, by) {
  const groups = new Map();
  for (const item of items) {
    const group = groups.get(item[by]) ?? { key: item[by], count: 0, nbytes: 0, spilled: 0, copies: 0 };
    group.count += 1;
    group.nbytes += item.nbytes;
    group.spilled += item.spilled ? item.nbytes : 0;
    group.copies += item.copy_of ? 1 : 0;
    groups.set(item[by], group);
  }
  const filter = { job_id: "job_id", node_id: "node_id" }[by];
  return table({
    label: "Objects, grouped",
    rows: [...groups.values()].sort((one, other) => other.nbytes - one.nbytes),
    key: (group) => group.key,
    empty: empty("No object is in shared memory. Small values travel without it; larger ones come here by stoker.put() and as results."),
    columns: [
      { title: by === "job_id" ? "job" : by === "node_id" ? "node" : "owner", cell: (group) => idLink(group.key), head: true },
      { title: "objects", cell: (group) => number(group.count), numeric: true },
      { title: "size", cell: (group) => bytes(group.nbytes), numeric: true },
      { title: "spilled to disk", cell: (group) => bytes(group.spilled), numeric: true },
      { title: "copies", cell: (group) => number(group.copies), numeric: true },
      { title: "show", cell: (group) => filter && h("a", { href: here({ [filter]: group.key }) }, "only these") },
    ],
  });
}

function largest(items) {
  return table({
    label: "The largest objects",
    rows: [...items].sort((one, other) => other.nbytes - one.nbytes).slice(0, SHOWN),
    key: (item) => `${item.object_id} ${item.node_id}`,
    empty: null,
    columns: [
      { title: "object", cell: (item) => h("span", { class: "id" }, item.object_id), head: true },
      { title: "size", cell: (item) => bytes(item.nbytes), numeric: true },
      { title: "node", cell: (item) => idLink(item.node_id) },
      { title: "job", cell: (item) => idLink(item.job_id) },
      { title: "owner", cell: (item) => idLink(item.owner_id) },
      { title: "where", cell: (item) => (item.spilled ? "on disk" : item.copy_of ? ["copy of ", idLink(item.copy_of)] : "in memory") },
      { title: "created", cell: (item) => ago(item.created_at_s) },
    ],
  });
}

function detachedTable(items) {
  return table({
    label: "Detached objects",
    rows: items,
    key: (item) => item.object_id,
    empty: empty("No detached objects; one outlives its job", `stoker.put(value, lifetime="detached")`),
    columns: [
      { title: "object", cell: (item) => item.name || h("span", { class: "id" }, item.object_id), head: true },
      { title: "state", cell: (item) => badge(item.state, item.message) },
      { title: "namespace", cell: (item) => item.namespace },
      { title: "size", cell: (item) => bytes(item.nbytes), numeric: true },
      { title: "nodes", cell: (item) => (item.inline ? "in the gcs" : item.nodes.map((id) => [idLink(id), " "])) },
      { title: "copies", cell: (item) => number(item.copies), numeric: true },
      { title: "job", cell: (item) => item.job_id && h("a", { href: to(["jobs", item.job_id]), class: "id" }, item.job_id) },
      { title: "created", cell: (item) => ago(item.created_at_s) },
      { title: "message", cell: (item) => brief(item.message), wide: true },
    ],
  });
}
