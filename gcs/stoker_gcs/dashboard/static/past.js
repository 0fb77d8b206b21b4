// Time travel: the bar that chooses an earlier moment, by the number of an event or by a time.

import { get } from "./api.js";
import { h, patch } from "./dom.js";
import { absolute, number } from "./format.js";
import { go, here, place } from "./router.js";

/**
 * Draw the bar; it is there while an earlier moment is shown, or is to be chosen.
 *
 * @param {HTMLElement & {known?: any}} element
 * @param {{choosing: boolean}} state
 */
export async function pastBar(element, { choosing }) {
  const at = place().query.at ?? "";
  document.body.classList.toggle("is-past", Boolean(at));
  if (!at && !choosing) {
    patch(element, []);
    return;
  }
  patch(element, bar(at, element.known));
  const known = await get("/v1/state", { at, limit: 1 }).catch((problem) => ({ problem }));
  const latest = await get("/v1/events", { order: "desc", limit: 1 }).catch(() => null);
  if ((place().query.at ?? "") !== at) return;
  element.known = { ...known, latest: latest?.seq ?? known.seq };
  patch(element, bar(at, element.known));
}

function bar(at, known) {
  const seq = known?.seq ?? 0;
  const oldest = known?.oldest_seq ?? 0;
  const latest = Math.max(known?.latest ?? 0, seq);
  return h("div", { class: at ? "past-bar on" : "past-bar" },
    h("strong", { key: "what" }, at ? "Looking at the past" : "Time travel"),
    known && !known.problem && h("span", { key: "when", class: "when" }, at ? `event ${number(seq)}, ${absolute(known.at_s)}` : "choose a moment"),
    known?.problem && h("span", { key: "problem", role: "alert" }, known.problem.message.split("\n", 1)[0]),
    h("label", { key: "slider", class: "slider" }, h("span", { class: "hidden" }, "Event"),
      h("input", {
        type: "range", min: oldest, max: latest, value: seq, disabled: !latest,
        "aria-valuetext": `event ${seq}`,
        onchange: (event) => go(here({ at: event.target.value })),
      })),
    h("button", { key: "back", type: "button", disabled: seq <= oldest, title: "One event earlier", onclick: () => go(here({ at: seq - 1 })) }, "‹"),
    h("button", { key: "forth", type: "button", disabled: !at || seq >= latest, title: "One event later", onclick: () => go(here({ at: seq + 1 })) }, "›"),
    h("label", { key: "field" }, h("span", { class: "hidden" }, "Event number or time"),
      h("input", { type: "text", value: at, placeholder: "1200 or 2026-05-04 12:00:00", onchange: (event) => go(here({ at: moment(event.target.value) })) })),
    h("a", { key: "live", class: "button", href: here({ at: "" }), onclick: () => patchAway() }, at ? "Back to live" : "Close"));
}

function patchAway() {
  dispatchEvent(new CustomEvent("past-closed"));
}

/** What was typed as the API wants it: the number of an event, or seconds since the epoch. @param {string} text */
export function moment(text) {
  const trimmed = text.trim();
  if (!trimmed || /^\d+$/.test(trimmed)) return trimmed;
  const at = Date.parse(trimmed.replace(" ", "T"));
  return Number.isNaN(at) ? trimmed : (at / 1000).toFixed(3);
}
