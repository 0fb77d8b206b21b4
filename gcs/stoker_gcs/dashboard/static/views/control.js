// The control plane: its processes, their health and settings, what is kept, and who one is.

import { all, get } from "../api.js";
import { attempt } from "../data.js";
import { h } from "../dom.js";
import { ago, bytes, duration, number } from "../format.js";
import * as session from "../session.js";
import { table } from "../table.js";
import { badge, brief, empty, facts, heading, idLink, panel, problemBox } from "../ui.js";

export const control = {
  title: () => "Control plane",
  topics: ["leader.", "token.", "secret.", "node.registered", "node.died", "records."],
  pause_ms: 2000,
  async load({ signal }) {
    const [plane, retention, nodes, whoami, tokens, leaders, secret] = await Promise.all([
      attempt(get("/v1/control-plane", {}, signal)),
      attempt(get("/v1/retention", {}, signal)),
      attempt(all("/v1/nodes", { state: "ALIVE,SUSPECT" }, signal)),
      attempt(get("/v1/whoami", {}, signal)),
      session.isAdmin() ? attempt(all("/v1/tokens", { sort: "created", order: "desc" }, signal)) : null,
      attempt(get("/v1/events", { kind: "leader.", order: "desc", limit: 20 }, signal)),
      session.isAdmin() ? attempt(get("/v1/secret", {}, signal)) : null,
    ]);
    return { plane, secret, retention, nodes, whoami, tokens, leaders };
  },
  draw({ plane, secret, retention, nodes, whoami, tokens, leaders }) {
    return [
      heading("Control plane"),
      h("div", { class: "columns", key: "top" },
        panel("Health", plane.problem ? problemBox(plane.problem) : facts(healthFacts(plane))),
        panel("You", whoami.problem ? problemBox(whoami.problem) : facts([
          ["name", whoami.name],
          ["role", h("b", null, whoami.role)],
          ["may", MAY[whoami.role]],
          ["namespaces", whoami.namespaces.join(", ")],
          ["token", whoami.token_id ? h("span", { class: "id" }, whoami.token_id) : "the cluster's secret"],
          ["it ends", whoami.expires_at_s ? ago(whoami.expires_at_s) : "never"],
          ["processes run as", whoami.run_as],
        ])),
        panel("Versions", nodes.problem ? problemBox(nodes.problem) : versionTable(nodes.items)),
        secret && panel("Secret", secret.problem ? problemBox(secret.problem) : facts([
          ["signs", h("span", { class: "id" }, secret.signs)],
          ["accepts besides", secret.accepts.length > 1 && secret.accepts.filter((name) => name !== secret.signs).join(", ")],
          ["still have the former", secret.behind.length > 0 && secret.behind.join(", ")],
        ]))),
      !plane.problem && panel("Processes", [
        processTable(plane.processes),
        plane.nodes_left_out > 0 && h("p", { class: "muted" }, `${number(plane.nodes_left_out)} more nodes were not asked.`),
      ]),
      panel("What is kept", retention.problem ? problemBox(retention.problem) : keptTable(retention)),
      !plane.problem && settingsPanel(plane),
      panel("Leaders", leaders.problem ? problemBox(leaders.problem) : leaderTable(leaders.items)),
      tokens && panel("Tokens", tokens.problem ? problemBox(tokens.problem) : tokenTable(tokens.items)),
    ];
  },
};

function healthFacts({ database, ephemeral, events, processes, answers }) {
  const lags = processes.map((one) => one.status?.loop_lag_s ?? 0);
  const schedulers = processes.filter((one) => one.service === "scheduler");
  const leader = schedulers.find((one) => one.leads);
  const behind = events.last - events.applied;
  return [
    ["database", `${database.kind}, revision ${database.revision}${database.nbytes === null ? "" : `, ${bytes(database.nbytes)}`}`],
    ["a read takes", duration(database.read_s)],
    ["ephemeral entries", ephemeral.kind === "redis" ? [badge(ephemeral.up ? "READY" : "LOST", ephemeral.up ? "" : "it does not answer"), " Redis"] : "in the memory of the gcs"],
    ["event log", `at ${number(events.last)}, ${behind > 0 ? `${number(behind)} not applied yet` : "all applied"}`],
    ["watches", number(events.watchers)],
    ["scheduler", leader ? `leads in epoch ${number(leader.epoch)}, ${number(schedulers.length - 1)} standing by` : badge("LOST", "no scheduler leads")],
    ["gcs", `${number(processes.filter((one) => one.service === "gcs").length)} of it, ${answers} answers`],
    ["longest lag of a loop", `${duration(Math.max(0, ...lags))} in the last 10 s`],
  ];
}

function processTable(rows) {
  return table({
    label: "Processes",
    rows,
    key: (one) => `${one.service} ${one.id}`,
    empty: empty("Nothing was heard of them for some seconds."),
    columns: [
      { title: "process", cell: (one) => [h("b", null, one.service), " ", idLink(one.id)], head: true },
      { title: "state", cell: (one) => (one.status ? badge(one.leads ? "ACTIVE" : "READY", stateWords(one)) : badge("LOST", one.problem)) },
      { title: "leads", cell: (one) => (one.leads ? (one.epoch ? `epoch ${number(one.epoch)}` : "yes") : "") },
      { title: "version", cell: (one) => one.status?.version ?? "" },
      { title: "on", cell: (one) => (one.status ? `${one.status.hostname}, pid ${one.status.pid}` : "") },
      { title: "since", cell: (one) => (one.status ? ago(one.status.started_at_s) : "") },
      { title: "lag", cell: (one) => (one.status ? duration(one.status.loop_lag_s) : ""), numeric: true },
      { title: "at", cell: (one) => brief(one.problem ? `${one.url}: ${one.problem}` : one.url), wide: true },
    ],
  });
}

const stateWords = (one) => (one.leads ? "it leads" : one.service === "nodelet" ? "it answers" : "it stands by, or serves beside the leader");

/** Settings that somebody has set, with the processes that have them; then all of this gcs. */
function settingsPanel(plane) {
  if (!plane.settings.length) return panel("Settings", empty("The values of settings are shown to admins."));
  const rows = new Map();
  for (const one of plane.processes) {
    for (const setting of one.status?.settings ?? []) {
      const key = JSON.stringify([setting.name, setting.value, setting.source]);
      if (!rows.has(key)) rows.set(key, { ...setting, key, of: [] });
      rows.get(key).of.push(one.service === "nodelet" ? idLink(one.id) : one.service);
    }
  }
  const set = [...rows.values()].sort((one, other) => (one.key < other.key ? -1 : 1));
  const defaults = plane.settings.filter((one) => one.source === "default").map((one) => ({ ...one, key: one.name }));
  return panel("Settings", [
    settingTable("Settings that were set", set, { title: "of", cell: (one) => one.of.map((name, index) => [index > 0 && ", ", name]) }),
    h("details", { key: "defaults" }, h("summary", null, `${number(defaults.length)} settings have their default`),
      settingTable("Settings with their default", defaults)),
  ]);
}

function settingTable(label, rows, ...more) {
  return table({
    label,
    rows,
    key: (one) => one.key,
    empty: empty("Nothing was set."),
    columns: [
      { title: "name", cell: (one) => h("code", null, one.name), head: true },
      { title: "value", cell: (one) => brief(one.value || "not set"), wide: true },
      { title: "from", cell: (one) => one.source },
      ...more,
      { title: "meaning", cell: (one) => brief(one.meaning), wide: true },
    ],
  });
}

const MAY = {
  admin: "do all",
  user: "start work, and see and end their own",
  viewer: "look on",
};

function versionTable(nodes) {
  const versions = new Map();
  for (const node of nodes) versions.set(node.version, [...(versions.get(node.version) ?? []), node]);
  return table({
    label: "Versions",
    rows: [...versions].map(([version, of]) => ({ version, of })),
    key: (row) => row.version,
    empty: empty("No node is alive."),
    columns: [
      { title: "version", cell: (row) => row.version, head: true },
      { title: "nodes", cell: (row) => number(row.of.length), numeric: true },
      { title: "such as", cell: (row) => idLink(row.of[0].node_id, row.of[0].hostname) },
    ],
  });
}

function keptTable(retention) {
  return [
    table({
      label: "What is kept",
      rows: retention.kinds,
      key: (one) => one.kind,
      columns: [
        { title: "kind", cell: (one) => one.kind.replaceAll("_", " "), head: true },
        { title: "count", cell: (one) => number(one.count), numeric: true },
        { title: "since", cell: (one) => ago(one.oldest_at_s) },
        { title: "at most", cell: (one) => (one.keep ? number(one.keep) : "any number"), numeric: true },
        { title: "for", cell: (one) => (one.keep_s ? duration(one.keep_s) : "ever"), numeric: true },
        { title: "have left", cell: (one) => number(one.removed), numeric: true },
      ],
    }),
    h("p", { class: "muted" }, `${number(retention.log_files)} log files with ${bytes(retention.log_bytes)}, ${number(retention.environments)} environments with ${bytes(retention.environment_bytes)} on the nodes.`),
  ];
}

function leaderTable(rows) {
  return table({
    label: "Leaders",
    rows,
    key: (event) => event.seq,
    empty: empty("No change of leaders is kept."),
    columns: [
      { title: "leads", cell: (event) => event.subject, head: true },
      { title: "process", cell: (event) => h("span", { class: "id" }, event.payload.holder) },
      { title: "epoch", cell: (event) => number(event.payload.epoch), numeric: true },
      { title: "since", cell: (event) => ago(event.at_s) },
      { title: "at", cell: (event) => brief(event.payload.url), wide: true },
    ],
  });
}

function tokenTable(rows) {
  return table({
    label: "Tokens",
    rows,
    key: (one) => one.token_id,
    empty: empty("No tokens of people", "stoker token create NAME --role viewer"),
    columns: [
      { title: "name", cell: (one) => one.name, head: true },
      { title: "role", cell: (one) => one.role },
      { title: "state", cell: (one) => badge(one.revoked ? "STOPPED" : "ACTIVE", one.revoked ? "revoked" : "") },
      { title: "namespaces", cell: (one) => one.namespaces.join(", ") },
      { title: "created", cell: (one) => ago(one.created_at_s) },
      { title: "by", cell: (one) => one.created_by },
      { title: "ends", cell: (one) => (one.expires_at_s ? ago(one.expires_at_s) : "never") },
      { title: "id", cell: (one) => h("span", { class: "id" }, one.token_id), wide: true },
    ],
  });
}
