// All nodes, with what each offers, what of it is held, and its GPUs.

import { all, get } from "../api.js";
import { attempt, records } from "../data.js";
import { h } from "../dom.js";
import { ago, bytes, number, percent } from "../format.js";
import { gpuGrid, stateOf } from "../gpus.js";
import { nodeButtons } from "../node-actions.js";
import { to } from "../router.js";
import { listQuery, pager } from "../table.js";
import { badge, choices, empty, heading, meter } from "../ui.js";

const STATES = [["", "alive"], ["DEAD", "dead"], ["ALIVE,SUSPECT,DEAD", "all"]];

export const nodes = {
  title: () => "Nodes",
  topics: ["node.", "gpu.", "tasks", "actor.", "job."],
  past: true,
  async load(context) {
    const { query, at, signal } = context;
    const [page, leases, cluster] = await Promise.all([
      records("nodes", listQuery({ state: query.state || "ALIVE,SUSPECT" }), context),
      at ? { items: [] } : attempt(all("/v1/leases", {}, signal)),
      at ? null : attempt(get("/v1/cluster", {}, signal)),
    ]);
    return { page, leases: leases.items ?? [], free: cluster?.nodes_available ?? {} };
  },
  draw({ page, leases, free }, { query, at, reload }) {
    return [
      heading("Nodes", choices("State", "state", STATES)),
      page.items.length ? h("div", { class: "node-grid", key: "grid" }, page.items.map((node) => card(node, leases, free[node.node_id], at, reload)))
        : query.state === "DEAD" ? empty("No node has died.") : empty("No node is alive. Start one", "stoker start --address URL"),
      pager(page),
    ];
  },
};

function card(node, leases, free, at, reload) {
  const total = node.resources;
  const held = (name) => (free ? total[name] - (free[name] ?? 0) : 0);
  const { cpu_percent, memory_bytes, workers, object_bytes } = node.usage;
  return h("section", { class: "node", key: node.node_id },
    h("header", null,
      h("h2", null, h("a", { href: to(["nodes", node.node_id]) }, node.hostname)),
      badge(stateOf(node), node.reason), h("span", { class: "id" }, node.node_id),
      !at && h("span", { class: "buttons" }, nodeButtons(node, reload))),
    node.conditions.length > 0 && h("p", { class: "notice" }, node.conditions.map((one) => `${one.kind}: ${one.reason}`).join("; ")),
    free && Object.keys(total).filter((name) => total[name] > 0).map((name) => meter(name, held(name), total[name],
      name === "memory" ? `${bytes(held(name))} of ${bytes(total[name])} held` : `${number(held(name))} of ${number(total[name])} held`)),
    node.devices.length > 0 && gpuGrid(node, leases),
    node.state !== "DEAD" && h("p", { class: "muted" },
      cpu_percent !== undefined && `CPU ${percent(cpu_percent / 100)} busy · `,
      memory_bytes !== undefined && `${bytes(memory_bytes)} of memory in use · `,
      workers !== undefined && `${number(workers)} workers · `,
      object_bytes !== undefined && `${bytes(object_bytes)} of objects · `,
      "heard of ", ago(node.heartbeat_at_s)),
    node.state === "DEAD" && h("p", null, node.reason));
}
