// One actor: its state, its calls, its output, its story, and why it waits.

import { get, path, send } from "../api.js";
import { attempt, record, records } from "../data.js";
import { ask } from "../dialog.js";
import { h } from "../dom.js";
import { errorPanel, explanationPanel, storyPanel } from "../explain.js";
import { ago, duration, number, resources } from "../format.js";
import { logPanel } from "../logs.js";
import { to } from "../router.js";
import { mayEnd } from "../session.js";
import { listQuery, pager } from "../table.js";
import { attemptTable } from "../task-tables.js";
import { badge, button, choices, facts, heading, idLink, panel, problemBox, tabs } from "../ui.js";

const TABS = [["", "Summary"], ["calls", "Calls"], ["output", "Output"], ["story", "Story"]];
const STATES = [["", "all"], ["WAITING,QUEUED", "waiting"], ["RUNNING", "running"], ["FINISHED", "finished"], ["FAILED", "failed"]];

export const actor = {
  title: ({ id }, data) => data?.record.name || data?.record.class_name || id,
  topics: ["actor.", "tasks"],
  past: true,
  async load(context) {
    const { id, query, signal, at } = context;
    const one = await record("actors", id, context);
    if (at) return { record: one };
    const part = {
      calls: () => records("tasks", listQuery({ sort: "created", order: "desc", actor_id: id, state: query.state }), context),
      story: () => get(path`/v1/story/${id}`, {}, signal),
      output: () => Promise.resolve(null),
    }[query.tab] ?? (() => get(path`/v1/actors/${id}/explain`, {}, signal));
    const job = one.job_id.startsWith("job_detached") ? null : await attempt(get(path`/v1/jobs/${one.job_id}`, {}, signal));
    return { record: one, part: await attempt(part()), user: job?.user };
  },
  draw({ record: one, part, user }, { query, at, reload }) {
    return [
      heading(one.name || one.class_name, badge(one.state), h("span", { class: "id" }, one.actor_id), !at && actions(one, user, reload)),
      !at && tabs(TABS, query.tab ?? ""),
      (at || !query.tab) && [
        one.death_cause && errorPanel(one.death_cause, one.state === "DEAD" ? "Why it died" : "Why its last process ended"),
        panel("Actor", facts(actorFacts(one))),
      ],
      part?.problem ? problemBox(part.problem) : [
        !at && !query.tab && one.state !== "DEAD" && explanationPanel(part),
        query.tab === "calls" && [choices("State", "state", STATES), attemptTable(part.items), pager(part)],
        query.tab === "output" && logPanel(path`/v1/jobs/${one.job_id}/worker-logs`, { query: { worker_id: one.worker_id }, live: one.state === "ALIVE" }),
        query.tab === "story" && storyPanel(part),
      ],
    ];
  },
};

function actions(one, user, reload) {
  const refused = mayEnd(user) ? "" : "only the user of its job, or an admin, may end an actor";
  return h("span", { class: "buttons" },
    h("a", { class: "button", key: "timeline", href: to(["timeline"], { actor_id: one.actor_id }) }, "timeline"),
    one.state !== "DEAD" && button("kill", { refused, tone: "danger", onclick: () => ask({
      title: `Kill ${one.name || one.class_name}?`,
      text: "Its process is ended at once, and it is not started again; calls that wait for it fail.",
      action: "Kill the actor",
      act: () => send("POST", path`/v1/actors/${one.actor_id}/kill`, { reason: "killed in the dashboard" }).then(reload),
    }) }));
}

function actorFacts(one) {
  return [
    ["class", one.class_name],
    ["name", one.name],
    ["namespace", one.namespace],
    ["job", idLink(one.job_id)],
    ["node", one.node_id && idLink(one.node_id)],
    ["worker", one.worker_id && h("a", { class: "id", href: to(["events"], { subject: one.worker_id }) }, one.worker_id)],
    ["pid", one.pid > 0 && String(one.pid)],
    ["holds", resources(one.resources)],
    ["why it waits", one.pending_reason],
    ["detached", one.detached && "yes"],
    ["incarnation", number(one.incarnation)],
    ["restarts", `${number(one.restarts)} of ${one.max_restarts < 0 ? "any number" : number(one.max_restarts)}`],
    ["for want of memory", one.oom_restarts > 0 && number(one.oom_restarts)],
    ["preemptions", one.preemptions > 0 && number(one.preemptions)],
    ["starts again", one.restart_at_s && ago(one.restart_at_s)],
    ["restart delay", one.restart_delay_s > 0 && duration(one.restart_delay_s)],
    ["state saved", one.saved_at_s && ago(one.saved_at_s)],
    ["created", ago(one.created_at_s)],
    ["started", one.started_at_s && ago(one.started_at_s)],
    ["ended", one.ended_at_s && ago(one.ended_at_s)],
  ];
}
