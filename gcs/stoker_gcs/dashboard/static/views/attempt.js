// One attempt of a task: what became of it, where its time went, its story and its output.

import { get, path } from "../api.js";
import { attempt as tried } from "../data.js";
import { partsBar } from "../charts.js";
import { h } from "../dom.js";
import { errorPanel, explanationPanel, storyPanel } from "../explain.js";
import { absolute, bytes, now, number, resources } from "../format.js";
import { logPanel } from "../logs.js";
import { here, to } from "../router.js";
import { badge, empty, facts, heading, idLink, panel, tabs } from "../ui.js";

const TABS = [["", "Summary"], ["output", "Output"], ["story", "Story"]];
const ENDED = new Set(["FINISHED", "FAILED", "CANCELLED"]);

export const attempt = {
  title: ({ id }, data) => data?.record.name || id,
  topics: ["tasks"],
  async load({ id, query, signal }) {
    const [attempts, explanation, story] = await Promise.all([
      get(path`/v1/tasks/${id}/attempts`, {}, signal),
      query.tab ? null : tried(get(path`/v1/tasks/${id}/explain`, {}, signal)),
      query.tab === "story" ? tried(get(path`/v1/story/${id}`, {}, signal)) : null,
    ]);
    const wanted = Number(query.attempt);
    const record = (query.attempt && attempts.items.find((one) => one.attempt === wanted)) || attempts.items[attempts.items.length - 1];
    return { record, attempts: attempts.items, explanation, story };
  },
  draw({ record: one, attempts, explanation, story }, { query }) {
    const last = one.attempt === attempts[attempts.length - 1].attempt;
    return [
      heading(one.name || one.task_id, badge(one.state), h("span", { class: "id" }, one.task_id), h("span", { class: "buttons" },
        h("a", { class: "button", href: to(["functions", one.name], { job_id: one.job_id }) }, "all of this function"))),
      attempts.length > 1 && attemptLinks(attempts, one),
      tabs(TABS, query.tab ?? ""),
      !query.tab && [
        errorPanel(one.error),
        panel("Where its time went", timeBar(one)),
        panel("Attempt", facts(attemptFacts(one))),
        last && explanation && !ENDED.has(one.state) && explanationPanel(explanation),
      ],
      query.tab === "output" && output(one),
      query.tab === "story" && storyPanel(story),
    ];
  },
};

function attemptLinks(attempts, shown) {
  return h("nav", { class: "choices", "aria-label": "Attempts", key: "attempts" }, attempts.map((one) =>
    h("a", { key: one.attempt, href: here({ attempt: one.attempt || "0" }), "aria-current": one === shown ? "true" : undefined }, `attempt ${one.attempt} `, badge(one.state))));
}

function output(one) {
  if (!one.worker_id) return empty("It has not started, so nothing was printed.");
  return [
    h("p", { class: "muted" }, "The output of the worker that ran it, which may have run others, too."),
    logPanel(path`/v1/tasks/${one.task_id}/logs`, { named: true, live: !ENDED.has(one.state) }),
  ];
}

function timeBar(one) {
  if (!one.submitted_at_s) return empty("It is not known when it was submitted.");
  const end = one.ended_at_s ?? now();
  const started = one.started_at_s ?? end;
  const queued = one.queued_at_s ?? null; // When its arguments were there, if that is known.
  const before = queued
    ? [{ name: "waited for arguments", value: queued - one.submitted_at_s, look: "waits" }, { name: "queued", value: started - queued, look: "queued" }]
    : [{ name: one.waiting_for ? "waited for arguments" : "waited and queued", value: started - one.submitted_at_s, look: "waits" }];
  const failed = one.state === "FAILED";
  return partsBar("Where its time went", [...before, { name: ENDED.has(one.state) ? "ran" : "runs", value: one.started_at_s ? end - started : 0, look: failed ? "bad" : "ran" }]);
}

function attemptFacts(one) {
  return [
    ["job", idLink(one.job_id)],
    ["attempt", number(one.attempt)],
    ["actor", one.actor_id && idLink(one.actor_id)],
    ["parent", one.parent_task_id && idLink(one.parent_task_id)],
    ["submitted", one.submitted_at_s && absolute(one.submitted_at_s)],
    ["started", one.started_at_s && absolute(one.started_at_s)],
    ["ended", one.ended_at_s && absolute(one.ended_at_s)],
    ["waits for", one.waiting_for],
    ["node", one.node_id && idLink(one.node_id)],
    ["worker", one.worker_id && h("a", { class: "id", href: to(["events"], { subject: one.worker_id }) }, one.worker_id)],
    ["asked for", one.demand && resources(one.demand.resources)],
    ["arguments", one.args_nbytes > 0 && bytes(one.args_nbytes)],
    ["result", one.result_nbytes > 0 && bytes(one.result_nbytes)],
    ["executed again for", one.reconstructs],
  ];
}
