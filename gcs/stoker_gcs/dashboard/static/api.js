// The gcs's HTTP API: JSON, lists in pages, streams of lines. The session's cookie authenticates.

let csrf = "";
/** @param {string} token What requests that change something have to show. */
export function useCsrf(token) {
  csrf = token;
}

/** An answer that is an error, as the problem document says it, or that there was no answer. */
export class Problem extends Error {
  /** @param {{status?: number, detail?: string, title?: string, code?: string, retryable?: boolean}} document */
  constructor(document) {
    super(document.detail || document.title || "the request failed");
    this.status = document.status ?? 0;
    this.code = document.code ?? "";
    this.retryable = document.retryable ?? false;
  }
}

/** @type {Array<() => void>} */
const listeners = [];
/** @param {() => void} listener Called when an answer says that nobody is logged in. */
export function onSignedOut(listener) {
  listeners.push(listener);
}

/**
 * @param {string} path
 * @param {Record<string, any>} [query] Values that are empty are left out.
 * @param {AbortSignal} [signal]
 * @returns {Promise<any>}
 */
export function get(path, query, signal) {
  return call("GET", path + search(query), { signal });
}

/**
 * Send a request that changes something.
 *
 * @param {string} method
 * @param {string} path
 * @param {any} [body]
 * @returns {Promise<any>}
 */
export function send(method, path, body) {
  return call(method, path, { body });
}

/**
 * The lines of JSON of a stream, in the lists in which they arrive.
 *
 * @param {string} path
 * @param {Record<string, any>} query
 * @param {AbortSignal} signal
 * @returns {AsyncGenerator<any[]>}
 */
export async function* lines(path, query, signal) {
  const response = await request("GET", path + search(query), { signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    const items = parts.filter((part) => part.trim()).map((part) => JSON.parse(part));
    if (items.length) yield items;
  }
  if (rest.trim()) yield [JSON.parse(rest)];
}

/**
 * All items of a list, up to `most`; `more` says whether there are others.
 *
 * @param {string} path
 * @param {Record<string, any>} query
 * @param {AbortSignal} [signal]
 * @param {number} [most]
 * @returns {Promise<{items: any[], more: boolean}>}
 */
export async function all(path, query = {}, signal = undefined, most = 5000) {
  const items = [];
  let cursor = "";
  do {
    const page = await get(path, { limit: 1000, ...query, cursor }, signal);
    items.push(...page.items);
    cursor = page.next_cursor;
  } while (cursor && items.length < most);
  return { items, more: Boolean(cursor) };
}

/**
 * @param {string} token
 * @returns {Promise<any>} The session that begins.
 */
export function logIn(token) {
  return call("POST", "/v1/session", { headers: { Authorization: `Bearer ${token}` } });
}

/**
 * A path of the API; what is put in is one part of it, whatever its characters.
 *
 * @param {TemplateStringsArray} texts
 * @param {...string} parts
 * @returns {string}
 */
export function path(texts, ...parts) {
  return String.raw({ raw: texts }, ...parts.map(encodeURIComponent));
}

function search(query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return given.length ? `?${new URLSearchParams(given.map(([name, value]) => [name, String(value)]))}` : "";
}

/** @typedef {{body?: any, headers?: Record<string, string>, signal?: AbortSignal}} Options */

/** @param {string} method @param {string} path @param {Options} options */
async function call(method, path, options) {
  const response = await request(method, path, options);
  const text = await response.text();
  return text ? JSON.parse(text) : null;
}

/** @param {string} method @param {string} path @param {Options} options @returns {Promise<Response>} */
async function request(method, path, { body, headers = {}, signal } = {}) {
  const all = { Accept: "application/json", ...headers };
  if (body !== undefined) all["Content-Type"] = "application/json";
  if (method !== "GET" && csrf) all["Stoker-CSRF"] = csrf;
  const content = body === undefined ? undefined : JSON.stringify(body);
  let response;
  try {
    response = await fetch(path, { method, headers: all, body: content, signal, credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem({ detail: "the cluster does not answer\nit is asked again until it does", retryable: true });
  }
  if (response.ok) return response;
  const problem = new Problem({ status: response.status, ...(await response.json().catch(() => ({}))) });
  if (problem.status === 401 && !headers.Authorization) listeners.forEach((listener) => listener());
  throw problem;
}
