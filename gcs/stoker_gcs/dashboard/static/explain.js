// Why something waits or what became of it, and its story.

import { h } from "./dom.js";
import { absolute, ago, clock, duration, resources } from "./format.js";
import { table } from "./table.js";
import { badge, brief, empty, facts, idLink, linked, message, panel, problemBox } from "./ui.js";

/** @param {any} explanation An explanation as the gcs gives it, or the problem instead. */
export function explanationPanel(explanation) {
  if (explanation.problem) return panel("Explanation", problemBox(explanation.problem));
  const told = explanation;
  return panel("Explanation", [
    message(told.summary),
    told.remedy && h("p", { class: "remedy" }, h("b", null, "What helps: "), linked(told.remedy)),
    facts([
      ["phase", told.phase],
      ["binding constraint", told.constraint && [h("code", null, told.constraint.kind), " ", linked(told.constraint.text)]],
      ["has waited", told.waited_s > 0 && duration(told.waited_s)],
      ["ahead in the queue", told.queue_position],
      ["asks for", told.demand && resources(told.demand.resources)],
    ]),
    told.remedies.length > 0 && h("ul", { class: "remedies" }, told.remedies.map((one) => h("li", null, linked(one.text)))),
    told.waiting.length > 0 && waitingTable(told.waiting),
    told.verdicts.length > 0 && verdictsTable(told.verdicts),
    told.holders.length > 0 && holdersTable(told.holders),
  ]);
}

function waitingTable(groups) {
  return table({
    label: "What of it waits",
    rows: groups,
    key: (one) => `${one.example_id} ${one.cause}`,
    columns: [
      { title: "waits", cell: (one) => [idLink(one.example_id, one.name || one.example_id), ` (${one.kind})`], head: true },
      { title: "count", cell: (one) => `${one.count}${one.count_exact ? "" : "+"}`, numeric: true },
      { title: "cause", cell: (one) => brief(one.cause), wide: true },
      { title: "what helps", cell: (one) => brief(one.remedy), wide: true },
    ],
  });
}

function verdictsTable(verdicts) {
  return table({
    label: "What each node says",
    rows: verdicts,
    key: (one) => one.node_id,
    columns: [
      { title: "node", cell: (one) => idLink(one.node_id), head: true },
      { title: "fits", cell: (one) => one.fit },
      { title: "rule", cell: (one) => h("code", null, one.rule) },
      { title: "detail", cell: (one) => brief(one.detail), wide: true },
      { title: "what helps", cell: (one) => brief(one.remedy), wide: true },
    ],
  });
}

function holdersTable(holders) {
  return table({
    label: "Who holds what it wants",
    rows: holders,
    key: (one) => one.lease_id,
    columns: [
      { title: "held by", cell: (one) => [one.name || one.kind, " ", idLink(one.actor_id || one.group_id || one.job_id)], head: true },
      { title: "node", cell: (one) => idLink(one.node_id) },
      { title: "has", cell: (one) => resources(one.resources) },
      { title: "queue", cell: (one) => one.queue },
      { title: "since", cell: (one) => ago(one.since_s) },
      { title: "until", cell: (one) => (one.until_s ? [ago(one.until_s), " ", one.until] : one.until || "not known") },
    ],
  });
}

/** @param {any} story A story as the gcs tells it, or the problem instead. */
export function storyPanel(story) {
  if (story.problem) return panel("Story", problemBox(story.problem));
  const first = story.lines[0]?.at_s ?? 0;
  return panel("Story", story.lines.length ? [
    story.since_s && h("p", { class: "muted" }, "What was before ", absolute(story.since_s), " has left by retention."),
    story.more && h("p", { class: "muted" }, "Older lines were left out."),
    h("ol", { class: "story" }, story.lines.map((line, index) => h("li", { key: `${line.seq ?? ""} ${index}` },
      h("time", { title: absolute(line.at_s) }, clock(line.at_s, { millis: true }), h("span", { class: "muted" }, ` +${duration(line.at_s - first)}`)),
      h("code", { class: "kind" }, line.kind),
      h("div", null, linked(line.text), line.why && h("div", { class: "why" }, message(line.why)))))),
  ] : empty("Nothing is told of it: it has left by retention, or nothing has happened yet."));
}

/** An error as data, with its code. @param {{code: string, message: string} | null} error */
export function errorPanel(error, title = "Failure") {
  return error && panel(title, [badge("FAILED"), " ", h("code", null, error.code), message(error.message)]);
}
