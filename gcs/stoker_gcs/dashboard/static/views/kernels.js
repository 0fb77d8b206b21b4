// Kernels: the configurations that were measured to be the fastest, by device and shape.

import { all, get } from "../api.js";
import { attempt } from "../data.js";
import { h } from "../dom.js";
import { ago, duration, number, percent } from "../format.js";
import { listQuery, pager, table } from "../table.js";
import { empty, filterField, heading, idLink, panel, problemBox } from "../ui.js";

export const kernels = {
  title: () => "Kernels",
  topics: ["kv.", "node.warmed"],
  async load({ query, signal }) {
    const [tuned, nodes] = await Promise.all([
      attempt(get("/v1/kernels", listQuery({ device: query.device }), signal)),
      attempt(all("/v1/nodes", { state: "ALIVE,SUSPECT" }, signal)),
    ]);
    return { tuned, nodes };
  },
  draw({ tuned, nodes }) {
    return [
      heading("Kernels"),
      h("div", { class: "filters", key: "filters" }, filterField("device", "device", { placeholder: "NVIDIA H200" })),
      panel("Tuned configurations", tuned.problem ? problemBox(tuned.problem) : [tunedTable(tuned.items), pager(tuned)]),
      panel("Compiled on nodes", nodes.problem ? problemBox(nodes.problem) : warmTable(nodes.items)),
    ];
  },
};

const plain = (values) => Object.entries(values ?? {}).map(([name, value]) => `${name}=${value}`).join(", ");

function tunedTable(rows) {
  return table({
    label: "Tuned configurations",
    rows,
    key: (one) => `${one.device} ${one.kernel} ${plain(one.key)}`,
    empty: empty("Nothing was measured yet", "stoker kernels tune rms_norm columns=4096 rows=16384"),
    columns: [
      { title: "kernel", cell: (one) => one.kernel, head: true },
      { title: "device", cell: (one) => one.device },
      { title: "shape", cell: (one) => h("code", null, plain(one.key)) },
      { title: "configuration", cell: (one) => h("code", null, plain(one.config)), wide: true },
      { title: "median", cell: (one) => duration(one.seconds), numeric: true },
      { title: "of the roofline", cell: (one) => (one.least_seconds && one.seconds ? percent(one.least_seconds / one.seconds) : ""), numeric: true },
      { title: "faster by", cell: (one) => (one.default_seconds ? percent(1 - one.seconds / one.default_seconds) : ""), numeric: true },
      { title: "measured", cell: (one) => (one.candidates ? `${number(one.measured)} of ${number(one.candidates)}` : ""), numeric: true },
      { title: "version", cell: (one) => one.version },
      { title: "when", cell: (one) => ago(one.at_s) },
    ],
  });
}

function warmTable(nodes) {
  return table({
    label: "Compiled on nodes",
    rows: nodes.filter((node) => node.warm_kernels.length),
    key: (node) => node.node_id,
    empty: empty("No node has compiled kernels ahead", "stoker kernels warm rms_norm"),
    columns: [
      { title: "node", cell: (node) => idLink(node.node_id, node.hostname), head: true },
      { title: "sets", cell: (node) => number(node.warm_kernels.length), numeric: true },
      { title: "which", cell: (node) => h("span", { class: "id" }, node.warm_kernels.join(", ")), wide: true },
    ],
  });
}
