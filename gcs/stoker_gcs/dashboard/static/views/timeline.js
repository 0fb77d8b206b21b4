// What ran where and when, a lane for each worker.

import { get } from "../api.js";
import { h } from "../dom.js";
import { absolute, duration, number } from "../format.js";
import { laneName, Lanes, nodeName } from "../lanes.js";
import { go, here, to } from "../router.js";
import { pager } from "../table.js";
import { empty, filterField, heading } from "../ui.js";

const LANES = 60;

/** @type {Lanes | null} */
let lanes = null;

export const timeline = {
  title: () => "Timeline",
  topics: ["tasks"],
  pause_ms: 2000,
  async load({ query, signal }) {
    const filters = { job_id: query.job_id, actor_id: query.actor_id, node_id: query.node_id };
    const buckets = Math.min(2000, Math.max(200, innerWidth));
    return get("/v1/tasks/timeline", { ...filters, from_s: query.from_s, to_s: query.to_s, buckets, lane_limit: LANES, cursor: query.cursor }, signal);
  },
  draw(data, { query }) {
    lanes?.show(data);
    return [
      heading("Timeline", h("span", { class: "buttons" },
        tool("−", "Zoom out", () => lanes?.zoom(2)), tool("+", "Zoom in", () => lanes?.zoom(0.5)), tool("all", "Show all", () => lanes?.all()))),
      h("div", { class: "filters", key: "filters" }, filterField("job", "job_id"), filterField("node", "node_id"), filterField("actor", "actor_id"),
        h("a", { href: to(["tasks"], { by: "none", job_id: query.job_id, node_id: query.node_id, actor_id: query.actor_id }) }, "as a table")),
      h("p", { class: "muted", key: "range" }, data.lanes.length
        ? `${absolute(data.from_s)}, ${duration(data.to_s - data.from_s)}; ${number(data.lanes.reduce((sum, lane) => sum + lane.count, 0))} attempts on ${number(data.lanes.length)} workers, by node. Click it, then zoom by wheel or + and −, move by drag or arrows.`
        : "Nothing ran in this range."),
      h("p", { class: "lane-words", key: "words", "aria-live": "off", mount: () => undefined }),
      !data.lanes.length && !data.last_s && empty("No tasks yet", "stoker job submit -- python train.py"),
      h("div", { class: "lanes", key: "lanes" }, h("canvas", {
        tabindex: "0",
        role: "img",
        "aria-label": `What ran on each worker over time; the same as a table is behind the link above. Workers by node: ${words(data)}`,
        mount: (canvas) => mounted(canvas, data),
      })),
      pager({ items: data.lanes, next_cursor: data.next_cursor }),
    ];
  },
};

/** The lanes in words. */
function words(data) {
  const nodes = new Map();
  for (const lane of data.lanes) nodes.set(lane.node_id, [...(nodes.get(lane.node_id) ?? []), laneName(lane)]);
  return [...nodes].map(([id, names]) => `${nodeName(data, id)}: ${names.join(", ")}`).join("; ");
}

function tool(text, title, onclick) {
  return h("button", { type: "button", key: text, title, "aria-label": title, onclick }, text);
}

function mounted(canvas, data) {
  lanes = new Lanes(canvas, {
    range: (from_s, to_s) => go(here({ from_s: from_s?.toFixed(4), to_s: to_s?.toFixed(4) }), { replace: true }),
    open: (task_id, attempt) => go(to(["tasks", task_id], { attempt: attempt || "" })),
    tell: (text) => { document.querySelector(".lane-words").textContent = text; },
  });
  const own = lanes;
  own.show(data);
  return () => {
    own.stop();
    if (lanes === own) lanes = null;
  };
}
