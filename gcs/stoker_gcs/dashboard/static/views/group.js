// One placement group: which bundle is on which node, and why it waits.

import { get, path, send } from "../api.js";
import { attempt, record } from "../data.js";
import { ask } from "../dialog.js";
import { h } from "../dom.js";
import { explanationPanel, storyPanel } from "../explain.js";
import { ago, number, resources } from "../format.js";
import { mayEnd } from "../session.js";
import { table } from "../table.js";
import { badge, button, facts, heading, idLink, panel } from "../ui.js";
import { sumOf } from "./groups.js";

export const group = {
  title: ({ id }, data) => data?.record.name || id,
  topics: ["placement_group.", "node."],
  past: true,
  async load(context) {
    const { id, signal, at } = context;
    const one = await record("placement_groups", id, context);
    if (at) return { record: one };
    const [explanation, story, job] = await Promise.all([
      attempt(get(path`/v1/placement-groups/${id}/explain`, {}, signal)),
      attempt(get(path`/v1/story/${id}`, {}, signal)),
      attempt(get(path`/v1/jobs/${one.job_id}`, {}, signal)),
    ]);
    return { record: one, explanation, story, user: job.user };
  },
  draw({ record: one, explanation, story, user }, { at, reload }) {
    return [
      heading(one.name || one.group_id, badge(one.state), h("span", { class: "id" }, one.group_id), !at && actions(one, user, reload)),
      panel("Group", facts([
        ["strategy", one.strategy],
        ["asks for", resources(sumOf(one.bundles))],
        ["job", idLink(one.job_id)],
        ["namespace", one.namespace],
        ["reason", one.reason],
        ["created", ago(one.created_at_s)],
        ["placed", one.placed_at_s && ago(one.placed_at_s)],
        ["removed", one.removed_at_s && ago(one.removed_at_s)],
        ["placed again", one.reschedules > 0 && number(one.reschedules)],
        ["gave way", one.preemptions > 0 && number(one.preemptions)],
        ["detached", one.detached && "yes"],
        ["preemptible", one.preemptible && "yes"],
      ])),
      panel("Bundles", table({
        label: "Bundles",
        rows: one.bundles.map((bundle, index) => ({ bundle, index, placement: one.placements[index] })),
        key: (each) => each.index,
        columns: [
          { title: "bundle", cell: (each) => number(each.index), head: true },
          { title: "asks for", cell: (each) => resources(each.bundle.resources) },
          { title: "node", cell: (each) => (each.placement ? idLink(each.placement.node_id) : "not reserved") },
          { title: "lease", cell: (each) => h("span", { class: "id" }, each.placement?.lease_id ?? "") },
          { title: "condition", cell: (each) => each.bundle.node_filter, wide: true },
        ],
      })),
      explanation && explanationPanel(explanation),
      story && storyPanel(story),
    ];
  },
};

function actions(one, user, reload) {
  if (one.state === "REMOVED") return null;
  const refused = mayEnd(user) ? "" : "only the user of its job, or an admin, may remove a group";
  return h("span", { class: "buttons" }, button("remove", { refused, tone: "danger", onclick: () => ask({
    title: `Remove ${one.name || one.group_id}?`,
    text: "Its bundles are given back, and what runs in them is ended.",
    action: "Remove the group",
    act: () => send("DELETE", path`/v1/placement-groups/${one.group_id}`).then(reload),
  }) }));
}
