// Shows the view of the present place, and keeps it up to date.

import { h, patch } from "./dom.js";
import { freeze } from "./format.js";
import { concerns, Paced } from "./live.js";
import { place, to } from "./router.js";
import { heading, problemBox } from "./ui.js";

/**
 * @typedef {object} View
 * @property {(context: {id: string}, data?: any) => string} title
 * @property {string[]} topics Kinds of changes (their prefixes, `tasks`, `reports`) after which it is loaded again.
 * @property {number} [pause_ms] The least pause before it is loaded again, where that is much work.
 * @property {boolean} [past] Whether it can show an earlier moment.
 * @property {(context: Context) => Promise<any>} load
 * @property {(data: any, context: Context) => any} draw
 *
 * @typedef {object} Context
 * @property {string} id What the view is of, if it is of one thing.
 * @property {Record<string, string>} query
 * @property {string} at The earlier moment that is shown; empty: now.
 * @property {AbortSignal} signal
 * @property {() => void} reload
 */

const BUSY_AFTER_MS = 200;

/** The part of the page that shows a view. */
export class Stage {
  /**
   * @param {HTMLElement} element
   * @param {(path: string[]) => {view: View, id: string} | null} find
   */
  constructor(element, find) {
    this.element = element;
    this.find = find;
    this.shown = "";
    this.topics = [];
    this.abort = new AbortController();
    this.paced = null;
  }

  /** Show what the address names. */
  open() {
    this.close();
    const { path, query } = place();
    const found = this.find(path);
    if (!found) {
      this.show(nothingHere(), "nothing here");
      return;
    }
    const { view, id } = found;
    const at = query.at ?? "";
    freeze(null);
    if (at && !view.past) {
      this.show([heading(view.title({ id })), onlyNow()], view.title({ id }));
      return;
    }
    this.abort = new AbortController();
    const context = { id, query, at, signal: this.abort.signal, reload: () => this.paced?.want() };
    this.topics = at ? [] : view.topics;
    this.paced = new Paced(() => this.load(view, context), view.pause_ms);
    this.paced.want();
  }

  /** @param {import("./live.js").Change} change */
  changed(change) {
    if (concerns(change, this.topics)) this.paced?.want();
  }

  close() {
    this.abort.abort();
    this.paced?.stop();
    this.paced = null;
    this.topics = [];
  }

  async load(view, context) {
    const { signal } = context;
    const busy = setTimeout(() => !signal.aborted && this.element.setAttribute("aria-busy", "true"), BUSY_AFTER_MS);
    try {
      const data = await view.load(context);
      if (!signal.aborted) this.show(view.draw(data, context), view.title(context, data));
    } catch (problem) {
      if (!signal.aborted) this.fail(view, context, problem);
    } finally {
      clearTimeout(busy);
      if (!signal.aborted) this.element.removeAttribute("aria-busy");
    }
  }

  fail(view, context, problem) {
    if (problem.name === "AbortError" || problem.status === 401) return;
    if (problem.status === undefined) console.error(problem);
    // What is shown stays while the cluster is away; the header says that it is.
    if (problem.retryable && this.shown === address()) {
      setTimeout(() => context.reload(), 2000);
      return;
    }
    this.show([heading(view.title(context)), problemBox(problem)], view.title(context));
    if (problem.retryable) setTimeout(() => context.reload(), 2000);
  }

  show(content, title) {
    document.title = `${title} · Stoker`;
    const moved = this.shown.split("?")[0] !== address().split("?")[0];
    this.shown = address();
    // A view of another place shares nothing with this one.
    patch(this.element, h("div", { class: "view", key: address().split("?")[0], "data-place": address() }, content));
    if (!moved) return;
    this.element.scrollTop = 0;
    if (document.activeElement === document.body) this.element.focus({ preventScroll: true });
  }
}

const address = () => location.hash;

function nothingHere() {
  return [heading("Nothing here"), h("p", null, "This address names no view. ", h("a", { href: to([]) }, "To the overview"), ".")];
}

function onlyNow() {
  return h("p", { class: "empty" }, "This view shows only the present. An earlier moment can be seen of nodes, jobs, tasks, actors, groups, queues, and the overview: choose one of these, or go back to live.");
}
