// What a job has used: GPU-hours and CPU-hours of its tasks, actors, placement groups and driver.

import { h } from "./dom.js";
import { number } from "./format.js";
import { table } from "./table.js";
import { empty, idLink, panel } from "./ui.js";

/** @param {any} cost What `/v1/jobs/ID/cost` says. */
export function costPanel(cost) {
  if (!cost.parts.length) return panel("Cost", empty("It has held no CPU and no GPU yet."));
  const grouped = cost.parts.some((one) => one.group_cpu_s || one.group_gpu_s);
  return panel("Cost", [
    h("div", { class: "figures" }, figure("GPU-hours", hours(cost.gpu_s)), figure("CPU-hours", hours(cost.cpu_s))),
    !cost.complete && h("p", { class: "muted" }, "It has more parts than are counted."),
    grouped && h("p", { class: "muted" }, "What runs in a placement group is in the sums by the group, which holds its bundles all the time."),
    table({
      label: "Cost by part",
      rows: cost.parts,
      key: (one) => `${one.kind} ${one.id} ${one.name}`,
      columns: [
        { title: "part", cell: (one) => [h("span", { class: "muted" }, one.kind, " "), one.id ? idLink(one.id, one.name || one.id) : one.name], head: true },
        { title: "GPU-hours", cell: (one) => hours(one.gpu_s), numeric: true },
        { title: "CPU-hours", cell: (one) => hours(one.cpu_s), numeric: true },
        { title: "of a group", cell: (one) => (one.group_cpu_s || one.group_gpu_s ? `${hours(one.group_gpu_s)} GPU-h, ${hours(one.group_cpu_s)} CPU-h` : ""), wide: true },
      ],
    }),
  ]);
}

function figure(name, value) {
  return h("div", { class: "figure", key: name }, h("b", null, value), h("span", { class: "muted" }, name));
}

/** Seconds as hours, with three digits that say something. @param {number} seconds */
export function hours(seconds) {
  const value = seconds / 3600;
  if (!value) return "0";
  if (value < 1e-4) return "< 0.0001";
  return value >= 1 ? number(Math.round(value * 100) / 100) : String(Number(value.toPrecision(3)));
}
