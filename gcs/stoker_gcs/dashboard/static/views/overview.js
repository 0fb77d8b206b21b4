// The cluster at a glance: what is used, what waits and why, what failed.

import { get } from "../api.js";
import { timeChart } from "../charts.js";
import { attempt } from "../data.js";
import { h } from "../dom.js";
import { ago, bytes, number, percent, resources, now } from "../format.js";
import { to } from "../router.js";
import { table } from "../table.js";
import { brief, counts, empty, heading, idLink, message, meter, panel, problemBox, toggles } from "../ui.js";

const RANGES = [["5m", "5 min"], ["", "1 h"], ["6h", "6 h"], ["1d", "1 d"], ["7d", "7 d"], ["60d", "60 d"]];
const RANGES_S = { "5m": 300, "6h": 21_600, "1d": 86_400, "7d": 604_800, "60d": 5_184_000 };

export const overview = {
  title: () => "Overview",
  topics: ["node.", "gpu.", "job.", "actor.", "placement_group.", "tasks"],
  pause_ms: 2000,
  past: true,
  async load({ query, at, signal }) {
    if (at) return { past: await get("/v1/state", { at, limit: 1, count: true }, signal) };
    const [seen, usage] = await Promise.all([
      get("/v1/overview", {}, signal),
      attempt(get("/v1/usage", { since_s: now() - (RANGES_S[query.range] ?? 3600), points: 300 }, signal)),
    ]);
    return { seen, usage };
  },
  draw({ past, seen, usage }) {
    if (past) return drawPast(past);
    return [
      heading("Overview"),
      seen.missing && h("div", { class: "notice", key: "missing" }, message(seen.missing)),
      tiles(seen),
      h("div", { class: "columns", key: "over time" }, panel("Over time", charts(usage), { aside: toggles("Range", "range", RANGES) })),
      h("div", { class: "columns broad", key: "lists" }, panel("What waits", waiting(seen.waiting)), panel("Recent failures", failures(seen.failures))),
    ];
  },
};

const VIEW_OF = { nodes: "nodes", jobs: "jobs", actors: "actors", placement_groups: "groups", queues: "queues", tasks: "tasks", detached_objects: "objects" };

function drawPast(past) {
  return [
    heading("Overview"),
    h("div", { class: "tiles", key: "tiles" }, Object.entries(past.counts).map(([kind, states]) => tile(kind.replaceAll("_", " "), VIEW_OF[kind] && to([VIEW_OF[kind]]), counts(states), kind))),
  ];
}

function tile(title, address, content, key = title) {
  const name = address ? h("a", { href: address }, title) : title;
  return h("section", { class: "tile", key }, h("h2", null, name), content);
}

function tiles(seen) {
  const { CPU: cpu, GPU: gpu, memory } = seen.resources;
  const gpus = seen.gpus;
  return h("div", { class: "tiles", key: "tiles" },
    tile("Resources", to(["nodes"]), [
      cpu && meter("CPU", cpu.used, cpu.total, `${number(cpu.used)} of ${number(cpu.total)}`),
      gpu && meter("GPU", gpu.used, gpu.total, `${number(gpu.used)} of ${number(gpu.total)}`),
      memory && meter("memory", memory.used, memory.total, `${bytes(memory.used)} of ${bytes(memory.total)}`),
    ]),
    gpus.count > 0 && tile("GPUs", to(["nodes"]), [
      meter("in use", gpus.used, gpus.count, `${number(gpus.used)} of ${number(gpus.count)}`),
      gpus.utilisation !== null && meter("busy", gpus.utilisation, 1, percent(gpus.utilisation)),
      meter("memory", gpus.memory_used_bytes, gpus.memory_total_bytes, `${bytes(gpus.memory_used_bytes)} of ${bytes(gpus.memory_total_bytes)}`),
    ]),
    tile("Nodes", to(["nodes"]), counts(seen.nodes)),
    tile("Jobs", to(["jobs"]), counts(seen.jobs)),
    tile("Tasks", to(["tasks"]), counts(seen.tasks)),
    tile("Actors", to(["actors"]), counts(seen.actors)),
    tile("Groups", to(["groups"]), counts(seen.groups)));
}

function charts(usage) {
  if (usage.problem) return problemBox(usage.problem);
  const { at_s, series } = usage;
  const used = (name, look, key) => ({ name, look, values: series[key] ?? [] });
  const some = (key) => (series[key] ?? []).some((value) => value !== null && value > 0);
  if (!at_s.length) return empty("Nothing was measured yet; the first values come in some seconds.");
  return h("div", { class: "charts" },
    timeChart({ label: "CPU", at_s, format: number, lines: [used("held", "area", "cpu_used"), used("of", "limit", "cpu_total")] }),
    some("gpu_total") && timeChart({ label: "GPU", at_s, format: number, lines: [used("held", "area", "gpu_used"), used("of", "limit", "gpu_total")] }),
    some("gpu_total") && timeChart({ label: "GPU utilisation", at_s, format: percent, lines: [used("busy", "area", "gpu_utilisation")] }),
    timeChart({ label: "Memory", at_s, format: bytes, lines: [used("used", "area", "memory_used_bytes"), used("of", "limit", "memory_total_bytes")] }),
    timeChart({ label: "Waiting", at_s, format: number, lines: [used("waiting", "area", "waiting")] }),
    timeChart({ label: "Tasks", at_s, format: number, lines: [used("running", "area", "tasks_running"), used("finished", "second", "tasks_finished"), used("failed", "bad", "tasks_failed")] }));
}

function waiting(rows) {
  return table({
    label: "What waits",
    rows,
    key: (one) => `${one.job_id} ${one.name} ${one.queue} ${one.cause}`,
    empty: empty("Nothing waits."),
    columns: [
      { title: "what", cell: (one) => h("a", { href: to(["jobs", one.job_id], { tab: "explanation" }) }, one.name || one.job_id), head: true },
      { title: "job", cell: (one) => idLink(one.job_id) },
      { title: "asks for", cell: (one) => resources(one.resources) },
      { title: "count", cell: (one) => number(one.count), numeric: true },
      { title: "queue", cell: (one) => h("a", { href: to(["queues", one.queue]) }, one.queue) },
      { title: "since", cell: (one) => ago(one.since_s) },
      { title: "cause, and what helps", cell: (one) => [brief(one.cause), one.remedy && h("div", { class: "muted" }, brief(one.remedy))], wide: true },
    ],
  });
}

function failures(rows) {
  return table({
    label: "Recent failures",
    rows,
    key: (one) => `${one.kind} ${one.id} ${one.code}`,
    empty: empty("Nothing has failed."),
    columns: [
      { title: "what", cell: (one) => [h("span", { class: "muted" }, one.kind, " "), idLink(one.id, one.name || one.id)], head: true },
      { title: "when", cell: (one) => ago(one.at_s) },
      { title: "times", cell: (one) => number(one.count), numeric: true },
      { title: "code", cell: (one) => h("code", null, one.code) },
      { title: "cause", cell: (one) => brief(one.message), wide: true },
    ],
  });
}

