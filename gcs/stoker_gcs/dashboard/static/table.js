// Tables: the server sorts and pages them; j, k and Enter go through their rows.

import { h } from "./dom.js";
import { number } from "./format.js";
import { here, place } from "./router.js";

/**
 * @typedef {object} Column
 * @property {string} title
 * @property {(row: any) => any} cell
 * @property {boolean} [numeric] Set to the right, with digits of one width.
 * @property {boolean} [head] It names the row.
 * @property {boolean} [wide] It takes the room that is left, and is cut where it is too long.
 * @property {string} [sort] By what the server sorts if this column's title is chosen.
 */

/**
 * @param {object} options
 * @param {string} options.label What the rows are, for those who do not see the table.
 * @param {Column[]} options.columns
 * @param {any[]} options.rows
 * @param {(row: any) => string} options.key
 * @param {any} [options.empty] What is shown where there are no rows.
 * @param {string} [options.sorted] The sort key and order that hold where the address names none: `created desc`.
 */
export function table({ label, columns, rows, key, empty = "nothing here", sorted = "" }) {
  if (!rows.length) return typeof empty === "string" ? h("p", { class: "empty" }, empty) : empty;
  return h("div", { class: "table", key: label, tabindex: "-1" },
    h("table", { "aria-label": label },
      h("thead", null, h("tr", null, columns.map((column) => heading(column, sorted)))),
      h("tbody", null, rows.map((row) => h("tr", { key: key(row), onclick: follow }, columns.map((column) => cell(column, row)))))));
}

function cell(column, row) {
  const kind = [column.numeric && "numeric", column.wide && "wide"].filter(Boolean).join(" ");
  if (column.head) return h("th", { scope: "row", class: kind || undefined }, column.cell(row));
  return h("td", { class: kind || undefined }, column.cell(row));
}

function heading(column, sorted) {
  const kind = column.numeric ? "numeric" : undefined;
  if (!column.sort) return h("th", { scope: "col", class: kind, key: column.title }, column.title);
  const { query } = place();
  const [sort, order] = query.sort ? [query.sort, query.order || "asc"] : sorted.split(" ");
  const here_ = sort === column.sort;
  const turned = here_ && order === "desc" ? "asc" : "desc";
  const address = here({ sort: column.sort, order: turned, cursor: "", from: "" });
  return h("th", { scope: "col", class: kind, key: column.title, "aria-sort": here_ ? { asc: "ascending", desc: "descending" }[order] : undefined },
    h("a", { href: address }, column.title, h("span", { "aria-hidden": "true" }, here_ ? (order === "desc" ? " ↓" : " ↑") : " ↕")));
}

/** A click on a row is one on its first link, unless it was on something else that acts, or chose text. */
function follow(event) {
  if (event.target.closest("a, button, input") || String(getSelection())) return;
  event.currentTarget.querySelector("a")?.click();
}

/**
 * Which part of a list is shown, and the way to the next.
 *
 * @param {{items: any[], next_cursor: string, total?: number | null, total_exact?: boolean}} page
 */
export function pager(page) {
  const { query } = place();
  const from = Number(query.from || 0);
  if (!from && !page.next_cursor && !page.total) return null;
  const total = page.total === null || page.total === undefined ? "" : ` of ${number(page.total)}${page.total_exact === false ? " or more" : ""}`;
  return h("nav", { class: "pager", "aria-label": "Pages", key: "pager" },
    h("span", null, page.items.length ? `${number(from + 1)}–${number(from + page.items.length)}${total}` : `none${total}`),
    query.cursor && h("a", { href: here({ cursor: "", from: "" }), key: "first" }, "first page"),
    page.next_cursor && h("a", { href: here({ cursor: page.next_cursor, from: from + page.items.length }), key: "next" }, "next page →"));
}

/**
 * The query of a list as the address has it.
 *
 * @param {Record<string, any>} [defaults]
 * @returns {Record<string, any>}
 */
export function listQuery(defaults = {}) {
  const { query } = place();
  const given = { sort: query.sort, order: query.order, cursor: query.cursor };
  const named = Object.fromEntries(Object.entries(given).filter(([, value]) => value));
  return { limit: 50, count: true, ...defaults, ...named };
}

/** Move the focus to the next row's link, or the previous one's. @param {1 | -1} step */
export function moveRow(step) {
  const links = [...document.querySelectorAll("main tbody tr")].map((row) => row.querySelector("a")).filter(Boolean);
  if (!links.length) return;
  const at = links.indexOf(document.activeElement?.closest("tr")?.querySelector("a"));
  links[Math.min(links.length - 1, Math.max(0, at + step))].focus();
}
