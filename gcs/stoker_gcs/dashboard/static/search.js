// The search: ids by their beginning, and functions by name.

import { get } from "./api.js";
import { h, patch } from "./dom.js";
import { go, to } from "./router.js";
import { addressOf, badge } from "./ui.js";

const PAUSE_MS = 150;

/**
 * A field that finds what an id names. It is a combobox, as screen readers know it.
 *
 * @param {HTMLElement} element
 * @returns {HTMLInputElement}
 */
export function searchBox(element) {
  let timer = 0;
  let found = [];
  let chosen = 0;
  let asked = "";

  const draw = (open) => patch(element, [
    h("input", {
      key: "field",
      type: "search",
      id: "search",
      role: "combobox",
      "aria-label": "Search by id or function",
      "aria-expanded": String(open),
      "aria-controls": "found",
      "aria-autocomplete": "list",
      "aria-activedescendant": open && found.length ? `found-${chosen}` : undefined,
      placeholder: "Search an id or a function   /",
      spellcheck: "false",
      autocomplete: "off",
      oninput: (event) => type(event.target.value.trim()),
      onkeydown: (event) => key(event),
      onblur: () => setTimeout(() => draw(false), PAUSE_MS),
    }),
    h("ul", { key: "found", id: "found", role: "listbox", "aria-label": "Found", hidden: !open },
      found.map((one, index) => h("li", {
        key: one.address,
        id: `found-${index}`,
        role: "option",
        "aria-selected": String(index === chosen),
        onmousedown: () => open_(one),
      }, h("span", { class: "muted" }, one.kind), " ", h("span", { class: "id" }, one.id), " ", one.name, " ", one.state && badge(one.state)))),
  ]);

  function type(text) {
    clearTimeout(timer);
    asked = text;
    if (!text) {
      found = [];
      draw(false);
      return;
    }
    timer = setTimeout(() => ask(text), PAUSE_MS);
  }

  async function ask(text) {
    const { matches } = await get("/v1/ids", { prefix: text, limit: 12 }).catch(() => ({ matches: [] }));
    if (text !== asked) return;
    found = matches.map((one) => ({ ...one, address: addressOf(one.id) ?? to(["events"], { subject: one.id }) }));
    found.push({ kind: "function", id: text, address: to(["functions", text]) });
    chosen = 0;
    draw(true);
  }

  function key(event) {
    const steps = { ArrowDown: 1, ArrowUp: -1 };
    if (event.key in steps && found.length) {
      chosen = (chosen + steps[event.key] + found.length) % found.length;
      draw(true);
    } else if (event.key === "Enter") {
      submit();
    } else if (event.key === "Escape") {
      draw(false);
      return;
    } else return;
    event.preventDefault();
  }

  async function submit() {
    clearTimeout(timer);
    if (asked && !found.length) await ask(asked);
    if (found[chosen]) open_(found[chosen]);
  }

  function open_(one) {
    found = [];
    asked = "";
    element.querySelector("input").value = "";
    element.querySelector("input").blur();
    draw(false);
    go(one.address);
  }

  draw(false);
  return element.querySelector("input");
}
