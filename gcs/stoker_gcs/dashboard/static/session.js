// Who looks on, and what that role may do.

import { get, logIn, send, useCsrf } from "./api.js";

/** @typedef {{user: string, role: string, csrf: string, namespaces: string[], expires_at_s: number | null}} Session */

/** @type {Session | null} */
let session = null;

/** @returns {Session | null} */
export const current = () => session;

/** @param {Session | null} begun @returns {Session | null} */
function begin(begun) {
  session = begun;
  useCsrf(begun?.csrf ?? "");
  return begun;
}

/** @returns {Promise<Session | null>} The session of the cookie, or that of a token in the address; null: none. */
export async function restore() {
  const given = location.hash.match(/^#login=(.+)$/);
  if (given) {
    // Out of the address first, so that it is in no history, whatever comes of it.
    history.replaceState(null, "", location.pathname);
    return enter(decodeURIComponent(given[1]));
  }
  try {
    return begin(await get("/v1/session"));
  } catch (problem) {
    if (problem.status === 401) return begin(null);
    throw problem;
  }
}

/** @param {string} token @returns {Promise<Session>} */
export async function enter(token) {
  return begin(await logIn(token.trim()));
}

/** Forget the session here; the gcs has ended it. */
export function forget() {
  begin(null);
}

/** End the session. */
export async function leave() {
  await send("DELETE", "/v1/session");
  begin(null);
}

/** @returns {boolean} Whether nodes and tokens are this role's to change. */
export const isAdmin = () => session?.role === "admin";

/** @returns {boolean} Whether this role may look at what is of all users, and so at earlier states. */
export const seesAll = () => ["admin", "viewer"].includes(session?.role ?? "");

/** @param {string} [owner] The user of a job. @returns {boolean} Whether it may end work, of that user. */
export function mayEnd(owner = undefined) {
  return isAdmin() || (session?.role === "user" && (owner === undefined || owner === session.user));
}
