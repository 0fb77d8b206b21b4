// One job: its output, tasks, actors, cost, attempts, environment, story, and why it waits.

import { get, path, send } from "../api.js";
import { attempt, record, records } from "../data.js";
import { ask } from "../dialog.js";
import { h } from "../dom.js";
import { explanationPanel, storyPanel } from "../explain.js";
import { ago, duration, number, resources } from "../format.js";
import { logPanel } from "../logs.js";
import { to } from "../router.js";
import { mayEnd } from "../session.js";
import { listQuery, pager, table } from "../table.js";
import { attemptTable, functionTable } from "../task-tables.js";
import { badge, brief, button, choices, empty, facts, heading, idLink, message, panel, problemBox, tabs } from "../ui.js";
import { actorTable } from "./actors.js";
import { costPanel } from "../cost.js";
import { ranFor } from "./jobs.js";
import { runTable } from "./training.js";

const TABS = [["output", "Output"], ["workers", "Workers' output"], ["functions", "Functions"], ["tasks", "Tasks"], ["actors", "Actors"],
  ["explanation", "Explanation"], ["story", "Story"], ["attempts", "Attempts"], ["cost", "Cost"], ["environment", "Environment"]];
const PAST_TABS = [["environment", "Environment"], ["tasks", "Tasks"], ["actors", "Actors"], ["attempts", "Attempts"]];
const TASK_STATES = [["", "all"], ["WAITING,QUEUED", "waiting"], ["RUNNING", "running"], ["FINISHED", "finished"], ["FAILED", "failed"], ["CANCELLED", "cancelled"]];
const ENDED = new Set(["SUCCEEDED", "FAILED", "STOPPED"]);

/** What each tab loads. */
const LOAD = {
  functions: ({ id, signal }) => get("/v1/tasks/summary", { job_id: id, limit: 200 }, signal),
  tasks: (context) => records("tasks", listQuery({ sort: "created", order: "desc", job_id: context.id, state: context.query.state }), context),
  actors: (context) => records("actors", listQuery({ sort: "created", order: "desc", job_id: context.id }), context),
  explanation: ({ id, signal }) => get(path`/v1/jobs/${id}/explain`, {}, signal),
  story: ({ id, signal }) => get(path`/v1/story/${id}`, {}, signal),
  cost: ({ id, signal }) => get(path`/v1/jobs/${id}/cost`, {}, signal),
};

export const job = {
  title: ({ id }, data) => data?.record.name || id,
  topics: ["job.", "actor.", "placement_group.", "environment.", "tasks", "reports"],
  past: true,
  async load(context) {
    const { query, at } = context;
    const known = at ? PAST_TABS : TABS;
    const tab = known.some(([name]) => name === query.tab) ? query.tab : known[0][0];
    const runs = at ? null : attempt(get("/v1/training-runs", { job_id: context.id, limit: 3, count: true }, context.signal));
    const [one, part, reported] = await Promise.all([record("jobs", context.id, context), LOAD[tab] ? attempt(LOAD[tab](context)) : null, runs]);
    return { record: one, tab, part, reported };
  },
  draw({ record: one, tab, part, reported }, { at, query, reload }) {
    return [
      heading(one.name || one.job_id, badge(one.state), h("span", { class: "id" }, one.job_id), !at && actions(one, reload)),
      one.message && ENDED.has(one.state) && one.state !== "SUCCEEDED" && h("div", { class: "notice bad", key: "message" }, message(one.message)),
      summary(one),
      one.elastic && elasticPanel(one.elastic),
      reported?.items?.length > 0 && panel("Training", runTable(reported.items, { withJob: false }), {
        aside: reported.next_cursor && h("a", { href: to(["training"], { job_id: one.job_id }) }, `all ${number(reported.total)} runs`),
      }),
      tabs(at ? PAST_TABS : TABS, tab),
      h("div", { key: `tab ${tab}`, class: "tab" }, part?.problem ? problemBox(part.problem) : DRAW[tab](one, part, query, at)),
    ];
  },
};

/** What each tab shows. */
const DRAW = {
  output: (one, _part, query) => (one.submitted
    ? [one.attempt > 1 && attemptChoice(one), logPanel(path`/v1/jobs/${one.job_id}/logs`, { query: { attempt: query.attempt }, live: !ENDED.has(one.state) })]
    : empty(`Its driver was started by hand on ${one.hostname || "another machine"}, and prints there; see its workers' output.`)),
  workers: (one) => logPanel(path`/v1/jobs/${one.job_id}/worker-logs`, { named: true, live: !ENDED.has(one.state) }),
  functions: (one, part) => functionTable(part.items, one.job_id),
  tasks: (_one, part, _query, at) => [choices("State", "state", TASK_STATES), attemptTable(part.items, { past: Boolean(at) }), pager(part)],
  actors: (_one, part) => [actorTable(part.items), pager(part)],
  explanation: (_one, part) => explanationPanel(part),
  story: (_one, part) => storyPanel(part),
  attempts: (one) => attempts(one),
  cost: (_one, part) => costPanel(part),
  environment: (one) => environment(one),
};

function actions(one, reload) {
  const refused = mayEnd(one.user) ? "" : "only its user, or an admin, may stop a job";
  return h("span", { class: "buttons" },
    h("a", { class: "button", key: "timeline", href: to(["timeline"], { job_id: one.job_id }) }, "timeline"),
    !ENDED.has(one.state) && button("stop", { refused, tone: "danger", onclick: () => ask({
      title: `Stop ${one.name || one.job_id}?`,
      text: "Its driver, tasks and actors are ended; what they have not saved is lost.",
      action: "Stop the job",
      act: () => send("POST", path`/v1/jobs/${one.job_id}/stop`).then(reload),
    }) }));
}

function summary(one) {
  return h("section", { class: "panel", key: "summary" }, facts([
    ["entrypoint", h("code", null, one.entrypoint)],
    ["user", one.user],
    ["queue", h("a", { href: to(["queues", one.queue]) }, one.queue)],
    ["priority", number(one.priority)],
    ["namespace", one.namespace],
    ["created", ago(one.created_at_s)],
    ["started", one.started_at_s && ago(one.started_at_s)],
    ["ended", one.ended_at_s && ago(one.ended_at_s)],
    ["ran", ranFor(one)],
    ["exit code", one.exit_code],
    ["driver", one.node_id ? idLink(one.node_id) : one.hostname && `${one.hostname}, pid ${one.pid}`],
    ["driver asks for", Object.keys(one.resources).length > 0 && resources(one.resources)],
    ["attempt", one.retries > 0 && `${one.attempt} of ${one.retries + 1}`],
    ["next attempt", one.retry_at_s && one.state === "PENDING" && ago(one.retry_at_s)],
    ["after", one.after.length > 0 && one.after.map((other) => [idLink(other.job_id), ` (${other.condition}) `])],
    ["part of", one.array_id && [idLink(one.array_id), `, index ${one.array_index}`]],
    ["started by", one.parent_job_id && idLink(one.parent_job_id)],
    ["schedule", one.schedule && h("a", { href: to(["jobs"], { schedule: one.schedule }) }, one.schedule)],
    ["array", one.array && `${number(one.array.indices.length)} jobs`],
    ["timeout", one.timeout_s && duration(one.timeout_s)],
    ["preemptible", one.preemptible && "yes"],
  ]));
}

/** What an elastic job has, is offered, and says of itself. */
function elasticPanel(state) {
  const hints = state.hints ?? {};
  const places = (replicas) => {
    const counts = new Map();
    for (const { node_id: node } of replicas) counts.set(node, (counts.get(node) ?? 0) + 1);
    return [number(replicas.length), ...[...counts].flatMap(([node, count]) => [" · ", `${count} on `, idLink(node)])];
  };
  const { offer } = state;
  return panel("Replicas", facts([
    ["generation", state.generation ? number(state.generation) : "none lives"],
    ["replicas", places(state.replicas)],
    ["limits", `${number(state.scaling.min_replicas)} to ${number(state.scaling.max_replicas)}, of ${resources(state.scaling.resources)}`],
    ["offered", offer && [...places(offer.replicas), `: ${offer.reason}`]],
    ["batch M", hints.batch > 0 && `${number(hints.batch)} samples, ${number(hints.local_batch)} a pass, ${number(hints.accumulated)} passes accumulate`],
    ["learning rate", hints.lr_scale != null && `× ${hints.lr_scale.toPrecision(3)}`],
    ["goodput", hints.goodput != null && `${number(Math.round(hints.goodput))} samples/s`],
    ["efficiency", hints.efficiency != null && `${Math.round(hints.efficiency * 100)} %`],
    ["noise scale", state.noise_scale != null && `${number(Math.round(state.noise_scale))} samples`],
    ["speedup expected", state.speedup != null && state.speedup.toPrecision(3)],
    ["fit of its step times", hints.params_error != null && `± ${(hints.params_error * 100).toPrecision(2)} %`],
    ["done", hints.done_fraction != null && `${Math.round(hints.done_fraction * 100)} %`],
    ["restarts", number(state.restarts)],
    ["preempted", state.preemptions > 0 && number(state.preemptions)],
    ["hints dropped", state.hints_dropped > 0 && `${number(state.hints_dropped)}: ${state.hints_problem}`],
  ]));
}

function attemptChoice(one) {
  const numbers = Array.from({ length: one.attempt }, (_, index) => one.attempt - index);
  return choices("Attempt", "attempt", numbers.map((number, index) => [index ? String(number) : "", `attempt ${number}`]));
}

function attempts(one) {
  const last = { attempt: one.attempt, started_at_s: one.attempt_started_at_s ?? one.started_at_s, ended_at_s: one.ended_at_s, cause: one.message, exit_code: one.exit_code, node_id: one.node_id, present: true };
  return table({
    label: "Attempts",
    rows: [...one.attempts, last],
    key: (each) => each.attempt,
    columns: [
      { title: "attempt", cell: (each) => h("a", { href: to(["jobs", one.job_id], { attempt: each.present ? "" : each.attempt }) }, number(each.attempt)), head: true },
      { title: "state", cell: (each) => (each.present ? badge(one.state) : each.preempted ? "preempted" : badge("FAILED")) },
      { title: "started", cell: (each) => ago(each.started_at_s) },
      { title: "ran", cell: (each) => (each.started_at_s && each.ended_at_s ? duration(each.ended_at_s - each.started_at_s) : ""), numeric: true },
      { title: "exit code", cell: (each) => each.exit_code ?? "", numeric: true },
      { title: "node", cell: (each) => idLink(each.node_id) },
      { title: "cause", cell: (each) => brief(each.cause), wide: true },
    ],
  });
}

function environment(one) {
  const given = Object.entries(one.runtime_env).filter(([, value]) => value && (typeof value !== "object" || Object.keys(value).length));
  return panel("Environment", given.length || Object.keys(one.metadata).length ? facts([
    ...given.map(([name, value]) => [name, h("pre", null, typeof value === "string" ? value : JSON.stringify(value, null, 2))]),
    ...Object.entries(one.metadata).map(([name, value]) => [`metadata: ${name}`, value]),
  ]) : empty("It has the environment of the nodes, and no metadata."));
}

