// The keyboard: `g` and a letter go to a view, `/` to the search, `j` and `k` through a table.

import { tell } from "./dialog.js";
import { h } from "./dom.js";
import { go, to } from "./router.js";
import { moveRow } from "./table.js";

const CHORD_MS = 1500;

/**
 * @param {Array<{key: string, name: string, title: string}>} views
 * @param {() => HTMLInputElement | undefined} search
 */
export function listenToKeys(views, search) {
  let chord = 0;
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !search() || document.querySelector("dialog[open]")) return;
    const field = /** @type {HTMLElement} */ (event.target).closest("input, textarea, select");
    if (field instanceof HTMLElement) {
      if (event.key === "Escape") field.blur();
      return;
    }
    const view = Date.now() - chord < CHORD_MS && views.find((one) => one.key === event.key);
    chord = 0;
    if (view) go(to(view.name ? [view.name] : []));
    else if (event.key === "g") chord = Date.now();
    else if (event.key === "/") search()?.focus();
    else if (event.key === "?") help(views);
    else if (event.key === "j") moveRow(1);
    else if (event.key === "k") moveRow(-1);
    else return;
    event.preventDefault();
  });
}

/** @param {Array<{key: string, title: string}>} views */
export function help(views) {
  const rows = [["/", "search by the beginning of an id"], ["j, k", "next and previous row"], ["Enter", "open the row"],
    ["+, −, 0, ←, →", "zoom and move the timeline, and a curve"], ["?", "these keys"],
    ...views.map((view) => [`g ${view.key}`, view.title])];
  tell("Keys", h("dl", { class: "keys" }, rows.map(([key, text]) => h("div", { key }, h("dt", null, h("kbd", null, key)), h("dd", null, text)))));
}
