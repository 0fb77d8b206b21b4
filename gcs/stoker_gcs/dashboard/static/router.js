// Where the page is: `#/jobs/JOB?tab=tasks`. All that a view shows is in the address, so a link shows the same.

/**
 * @typedef {{path: string[], query: Record<string, string>}} Place
 * @returns {Place}
 */
export function place() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?", 2);
  return {
    path: path.split("/").filter(Boolean).map(decoded),
    query: Object.fromEntries(new URLSearchParams(query)),
  };
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // Typed by hand, with a stray per cent sign.
  }
}

/**
 * The address of a place. The moment that is looked at (`at`) stays the same unless `query` names another.
 *
 * @param {string[]} path
 * @param {Record<string, string | number | undefined | null>} [query]
 * @returns {string}
 */
export function to(path, query = {}) {
  const kept = { at: place().query.at, ...query };
  const given = Object.entries(kept).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const text = new URLSearchParams(given.map(([name, value]) => [name, String(value)])).toString();
  return `#/${path.map(encodeURIComponent).join("/")}${text && `?${text}`}`;
}

/**
 * The address of this place with some of its query changed; empty values leave it.
 *
 * @param {Record<string, string | number | undefined | null>} changes
 * @returns {string}
 */
export function here(changes) {
  const { path, query } = place();
  return to(path, { ...query, ...changes });
}

/**
 * Go to an address. With `replace` the browser's history has no entry more.
 *
 * @param {string} address
 * @param {{replace?: boolean}} [options]
 */
export function go(address, { replace = false } = {}) {
  if (!replace) {
    location.hash = address;
    return;
  }
  history.replaceState(null, "", address);
  dispatchEvent(new HashChangeEvent("hashchange"));
}
