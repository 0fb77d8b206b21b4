// One node: what it has, who holds it, its workers, and what happened to it.

import { all, get, path } from "../api.js";
import { attempt, record } from "../data.js";
import { h } from "../dom.js";
import { storyPanel } from "../explain.js";
import { absolute, ago, bytes, number, percent, resources } from "../format.js";
import { gpuGrid, stateOf } from "../gpus.js";
import { nodeButtons, releaseButton } from "../node-actions.js";
import { to } from "../router.js";
import { table } from "../table.js";
import { badge, empty, facts, heading, idLink, panel, problemBox } from "../ui.js";

export const node = {
  title: ({ id }, data) => data?.record.hostname ?? id,
  topics: ["node.", "gpu.", "tasks", "actor.", "worker."],
  past: true,
  async load(context) {
    const { id, at, signal } = context;
    if (at) return { record: await record("nodes", id, context) };
    const [one, leases, workers, drain, story] = await Promise.all([
      record("nodes", id, context),
      attempt(all("/v1/leases", { node_id: id }, signal)),
      attempt(all("/v1/workers", { node_id: id }, signal)),
      attempt(get(path`/v1/nodes/${id}/drain`, {}, signal)),
      attempt(get(path`/v1/story/${id}`, {}, signal)),
    ]);
    return { record: one, leases, workers, drain, story };
  },
  draw({ record: one, leases, workers, drain, story }, { at, reload }) {
    return [
      heading(one.hostname, badge(stateOf(one), one.reason), h("span", { class: "id" }, one.node_id),
        !at && h("span", { class: "buttons" }, nodeButtons(one, reload),
          h("a", { class: "button", href: to(["timeline"], { node_id: one.node_id }) }, "timeline"))),
      panel("Node", facts(nodeFacts(one))),
      drain && !drain.problem && drain.state !== "NONE" && drainPanel(drain),
      one.devices.length > 0 && panel("GPUs", gpuGrid(one, leases?.items ?? [], at ? undefined : releaseButton(one, reload))),
      leases && panel("Held by", leases.problem ? problemBox(leases.problem) : leaseTable(leases.items)),
      workers && panel("Workers", workers.problem ? problemBox(workers.problem) : workerTable(workers.items)),
      story && storyPanel(story),
    ];
  },
};

function nodeFacts(one) {
  const usage = one.usage;
  return [
    ["resources", resources(one.resources)],
    ["reason", one.reason],
    ["cordoned", one.cordon && `by ${one.cordon.by}, ${absolute(one.cordon.at_s)}${one.cordon.reason && `: ${one.cordon.reason}`}`],
    ["CPU busy", usage.cpu_percent !== undefined && percent(usage.cpu_percent / 100)],
    ["load", usage.load1 !== undefined && number(usage.load1)],
    ["memory in use", usage.memory_bytes !== undefined && bytes(usage.memory_bytes)],
    ["objects", usage.object_bytes !== undefined && bytes(usage.object_bytes)],
    ["log files", usage.log_bytes > 0 && bytes(usage.log_bytes)],
    ["heartbeat", ago(one.heartbeat_at_s)],
    ["registered", ago(one.registered_at_s)],
    ["address", one.url],
    ["incarnation", number(one.incarnation)],
    ["version", one.version],
    ["driver and CUDA", one.driver_version && `${one.driver_version}, CUDA ${one.cuda_version}`],
    ["GPU isolation", one.gpu_isolation || one.gpu_isolation_error],
    ["GPU error", one.gpu_error],
    ["labels", Object.entries(one.labels).map(([name, value]) => h("code", { key: name, class: "chip" }, `${name}=${value}`))],
    ["taints", one.taints.length > 0 && one.taints.map((taint) => h("code", { class: "chip" }, `${taint.key}=${taint.value}:${taint.effect}`))],
    ["session folder", h("code", null, one.session_dir)],
  ];
}

function drainPanel(drain) {
  return panel("Drain", [
    h("p", null, badge(drain.state), " ", drain.summary),
    drain.left.length > 0 && table({
      label: "What is left there",
      rows: drain.left,
      key: (left) => `${left.kind} ${left.id}`,
      columns: [
        { title: "kind", cell: (left) => left.kind },
        { title: "name", cell: (left) => left.name || idLink(left.id), head: true },
        { title: "why", cell: (left) => left.why, wide: true },
      ],
    }),
  ]);
}

/** @param {any[]} rows */
export function leaseTable(rows) {
  return table({
    label: "Leases",
    rows,
    key: (lease) => lease.lease_id,
    empty: empty("Nothing is held."),
    columns: [
      { title: "name", cell: (lease) => idLink(lease.actor_id || lease.group_id || lease.job_id, lease.name || lease.kind), head: true },
      { title: "kind", cell: (lease) => lease.kind },
      { title: "job", cell: (lease) => idLink(lease.job_id) },
      { title: "has", cell: (lease) => resources(lease.resources), wide: true },
      { title: "GPUs", cell: (lease) => Object.keys(lease.gpus).join(", ") },
      { title: "priority", cell: (lease) => number(lease.priority), numeric: true },
      { title: "since", cell: (lease) => ago(lease.granted_at_s) },
    ],
  });
}

function workerTable(rows) {
  return table({
    label: "Workers",
    rows,
    key: (worker) => worker.worker_id,
    empty: empty("No worker runs."),
    columns: [
      { title: "worker", cell: (worker) => idLink(worker.worker_id), head: true },
      { title: "state", cell: (worker) => badge(worker.state) },
      { title: "runs", cell: (worker) => idLink(worker.actor_id || worker.job_id) },
      { title: "pid", cell: (worker) => worker.pid, numeric: true },
      { title: "memory", cell: (worker) => bytes(worker.rss_bytes), numeric: true },
      { title: "started", cell: (worker) => ago(worker.started_at_s) },
    ],
  });
}
