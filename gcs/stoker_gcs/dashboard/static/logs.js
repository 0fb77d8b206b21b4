// Output of processes: it follows, can be searched, and draws only the lines that are in sight.

import { lines } from "./api.js";
import { h, patch } from "./dom.js";
import { clock, number } from "./format.js";
import { choices } from "./ui.js";
import { place } from "./router.js";

const ROW = 18;
const MOST = 100_000;
const ANSI = /\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07/g;
const TAILS = [["", "1,000"], ["10000", "10,000"], ["100000", "100,000"]];

/**
 * The lines of a stream of output.
 *
 * @param {string} path
 * @param {{query?: Record<string, any>, named?: boolean, live?: boolean}} [options] `named`: with whose output it
 *   is; `live`: with what is still to come.
 */
export function logPanel(path, { query = {}, named = false, live = true } = {}) {
  const tail = Number(place().query.tail || 1000);
  const key = `${path} ${tail} ${JSON.stringify(query)}`;
  return h("div", { class: "log-panel", key: "log panel" },
    h("div", { class: "log-tools" }, h("span", { class: "muted" }, "last lines"), choices("How many lines", "tail", TAILS)),
    h("div", { class: "log", key, mount: (element) => new Log(element, { named }).start(path, { tail, ...query, follow: live || undefined }) }));
}

class Log {
  constructor(element, { named }) {
    this.named = named;
    this.all = [];
    this.shown = this.all;
    this.needle = "";
    this.following = true;
    this.state = "loading";
    this.frame = 0;
    patch(element, [
      h("div", { class: "log-tools" },
        h("label", null, "search ", h("input", { type: "search", spellcheck: "false", oninput: (event) => this.search(event.target.value) })),
        h("label", null, h("input", { type: "checkbox", checked: true, onchange: (event) => this.follow(event.target.checked) }), " follow"),
        h("button", { type: "button", onclick: () => this.copy() }, "copy"),
        h("span", { class: "muted", role: "status" })),
      h("div", { class: "log-lines", tabindex: "0", role: "region", "aria-label": "Output", onscroll: () => this.scrolled() },
        h("div", { class: "log-room" }, h("div", { class: "log-rows" }))),
    ]);
    this.status = element.querySelector("[role=status]");
    this.box = element.querySelector(".log-lines");
    this.room = element.querySelector(".log-room");
    this.rows = element.querySelector(".log-rows");
    this.checkbox = element.querySelector("[type=checkbox]");
    this.sized = new ResizeObserver(() => this.want());
    this.sized.observe(this.box);
  }

  /** @returns {() => void} What ends it. */
  start(path, query) {
    const abort = new AbortController();
    this.read(path, query, abort.signal);
    return () => {
      abort.abort();
      this.sized.disconnect();
      cancelAnimationFrame(this.frame);
    };
  }

  async read(path, query, signal) {
    try {
      for await (const some of lines(path, query, signal)) {
        this.state = "live";
        this.add(some);
      }
      this.state = "ended";
    } catch (problem) {
      if (signal.aborted) return;
      this.state = problem.message.split("\n", 1)[0];
    }
    this.want();
  }

  add(some) {
    for (const line of some) line.text = line.text.replace(ANSI, "");
    this.all.push(...some);
    if (this.all.length > MOST) this.all.splice(0, this.all.length - MOST);
    this.shown = this.needle ? this.all.filter((line) => this.has(line)) : this.all;
    this.want();
  }

  has(line) {
    return line.text.toLowerCase().includes(this.needle);
  }

  search(text) {
    this.needle = text.toLowerCase();
    this.shown = this.needle ? this.all.filter((line) => this.has(line)) : this.all;
    this.want();
  }

  follow(on) {
    this.following = on;
    this.want();
  }

  scrolled() {
    const atEnd = this.box.scrollTop + this.box.clientHeight >= this.box.scrollHeight - ROW;
    if (atEnd !== this.following) {
      this.following = atEnd;
      this.checkbox.checked = atEnd;
    }
    this.want();
  }

  copy() {
    navigator.clipboard?.writeText(this.shown.map((line) => line.text).join("\n"));
  }

  want() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.room.style.height = `${Math.max(1, this.shown.length) * ROW}px`;
    if (this.following) this.box.scrollTop = this.room.offsetHeight;
    const first = Math.max(0, Math.floor(this.box.scrollTop / ROW) - 5);
    const count = Math.ceil(this.box.clientHeight / ROW) + 10;
    this.rows.style.transform = `translateY(${first * ROW}px)`;
    patch(this.rows, this.shown.slice(first, first + count).map((line) => this.row(line)));
    const found = this.needle ? `${number(this.shown.length)} of ` : "";
    const states = { loading: "loading", live: "following", ended: "to its end" };
    const nothing = this.state === "ended" && !this.all.length ? "nothing was printed" : "";
    this.status.textContent = nothing || `${found}${number(this.all.length)} lines, ${states[this.state] ?? this.state}`;
  }

  row(line) {
    return h("div", { class: line.worker_id ? `log-line ${line.stream ?? ""}` : "log-line note" },
      line.at_s > 0 && h("span", { class: "log-time" }, clock(line.at_s), " "),
      this.named && line.name && h("span", { class: "log-name" }, `${line.name} ${line.pid} `),
      this.marked(line.text));
  }

  marked(text) {
    if (!this.needle) return text;
    const parts = [];
    let from = 0;
    const low = text.toLowerCase();
    for (let at = low.indexOf(this.needle); at >= 0; at = low.indexOf(this.needle, from)) {
      parts.push(text.slice(from, at), h("mark", null, text.slice(at, at + this.needle.length)));
      from = at + this.needle.length;
    }
    return [...parts, text.slice(from)];
  }
}
