// The GPUs of a node: who has them, and how busy they are.

import { h } from "./dom.js";
import { bytes, NOTHING, percent } from "./format.js";
import { idLink } from "./ui.js";

/** A node's state in one word: an order says more than that it lives. @param {any} node */
export function stateOf(node) {
  if (node.state !== "ALIVE") return node.state;
  if (node.drain) return "DRAINING";
  return node.cordon ? "CORDONED" : "ALIVE";
}

/**
 * Each GPU as a cell.
 *
 * @param {any} node
 * @param {any[]} leases
 * @param {(device: any) => any} [action] What can be done with one.
 */
export function gpuGrid(node, leases, action = () => null) {
  return h("ul", { class: "gpus", "aria-label": "GPUs" }, node.devices.map((device) => gpu(device, node.usage, holdersOf(leases, node, device), action(device))));
}

function holdersOf(leases, node, device) {
  return leases.filter((lease) => lease.node_id === node.node_id && lease.gpus[device.index] && lease.kind !== "bundle");
}

function gpu(device, usage, holders, action) {
  const measured = (what) => usage[`gpu${device.index}_${what}`];
  const busy = measured("percent");
  const heat = measured("temperature_celsius");
  const power = measured("power_watts");
  const used = measured("memory_bytes");
  return h("li", { key: device.index, class: `gpu ${device.quarantine ? "bad" : ""} ${holders.length || measured("held") ? "held" : ""}` },
    h("div", { class: "gpu-name", title: `${device.name} ${device.mig_profile}\n${device.uuid}` }, h("b", null, device.index), ` ${device.mig_profile || device.name}`),
    h("div", { class: "bar", role: "img", "aria-label": `GPU ${device.index} is ${busy === undefined ? "of unknown use" : `${busy} % busy`}` },
      h("span", { class: "fill", style: { width: `${busy ?? 0}%` } })),
    h("div", { class: "gpu-numbers" }, busy === undefined ? NOTHING : percent(busy / 100), " · ",
      used === undefined ? bytes(device.memory_bytes) : `${bytes(used)} of ${bytes(device.memory_bytes)}`,
      heat !== undefined && ` · ${Math.round(heat)} °C`, power !== undefined && ` · ${Math.round(power)} W`),
    h("div", { class: "gpu-holder" }, device.quarantine
      ? h("span", { title: device.quarantine }, "quarantined: ", device.quarantine)
      : holders.length ? holders.map((lease) => h("span", { key: lease.lease_id }, idLink(lease.actor_id || lease.job_id, lease.name || lease.kind), lease.gpus[device.index] < 1 && ` ${percent(lease.gpus[device.index])}`, " "))
        : h("span", { class: "muted" }, measured("held") ? "held" : "free")),
    action);
}
