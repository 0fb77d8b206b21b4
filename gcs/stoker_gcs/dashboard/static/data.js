// Records of the cluster, as they are now or as they were: `at` is the moment in the address.

import { get } from "./api.js";
import { freeze } from "./format.js";

const LISTS = {
  nodes: { list: "/v1/nodes", id: "node_id" },
  jobs: { list: "/v1/jobs", id: "job_id" },
  actors: { list: "/v1/actors", id: "actor_id" },
  placement_groups: { list: "/v1/placement-groups", id: "group_id" },
  queues: { list: "/v1/queues", id: "name" },
  schedules: { list: "/v1/schedules", id: "name" },
  tasks: { list: "/v1/tasks", id: "task_id" },
  detached_objects: { list: "/v1/detached-objects", id: "object_id" },
};
const PAST_FILTERS = ["state", "job_id", "node_id", "limit", "cursor"];
const PAST_PAGES = 20;

/**
 * @typedef {{at: string, signal: AbortSignal}} Moment
 * @typedef {{items: any[], next_cursor: string, total?: number | null, total_exact?: boolean, past?: any}} Page
 */

/**
 * A page of records of a kind. At an earlier moment only some filters hold, and the order is that of ids.
 *
 * @param {string} kind
 * @param {Record<string, any>} query
 * @param {Moment} moment
 * @returns {Promise<Page>}
 */
export async function records(kind, query, { at, signal }) {
  if (!at) return get(LISTS[kind].list, query, signal);
  const known = Object.fromEntries(PAST_FILTERS.map((name) => [name, query[name]]));
  const past = await get("/v1/state", { ...known, at, kind }, signal);
  freeze(past.at_s);
  return { items: past[kind], next_cursor: past.next_cursor, past };
}

/**
 * One record, as it is, or as it was.
 *
 * @param {string} kind
 * @param {string} id
 * @param {Moment} moment
 * @returns {Promise<any>}
 */
export async function record(kind, id, moment) {
  const { list, id: name } = LISTS[kind];
  if (!moment.at) return get(`${list}/${encodeURIComponent(id)}`, {}, moment.signal);
  const filters = ["job_id", "node_id"].includes(name) ? { [name]: id } : {};
  let cursor = "";
  for (let pages = 0; pages < PAST_PAGES; pages += 1) {
    const page = await records(kind, { ...filters, limit: 1000, cursor }, moment);
    const found = page.items.find((item) => item[name] === id);
    if (found) return found;
    cursor = page.next_cursor;
    if (!cursor) break;
  }
  throw Object.assign(new Error(`there was no ${id} at that moment\nchoose a later one, or go back to live`), { status: 404 });
}

/**
 * What a request brings, or what it says instead: one part of a view that fails leaves the others as they are.
 *
 * @param {Promise<any>} request
 * @returns {Promise<any>} With a `problem` if it failed.
 */
export function attempt(request) {
  return request.catch((problem) => {
    if (problem.name === "AbortError" || problem.status === 401) throw problem;
    return { problem };
  });
}
