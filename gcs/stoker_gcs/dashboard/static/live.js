// What changes: one stream of the gcs tells which kinds of things did, and whoever shows them asks again.

import { get } from "./api.js";

/** @typedef {{seq: number, at_s: number, kinds: Record<string, number>, tasks: number, reports: number}} Change */

const RETRY_MS = 2000;
/** The gcs is never silent for so long: a connection that is, is none. */
const SILENT_MS = 45_000;

/** The stream of changes, and whether it is there. It reconnects for ever, and says so. */
export class Live {
  /** @param {{change: (change: Change) => void, state: (state: "connecting" | "live" | "reconnecting") => void}} on */
  constructor(on) {
    this.on = on;
    this.source = null;
    this.timer = 0;
    this.opened = false;
    this.silence = 0;
  }

  start() {
    this.stop();
    this.on.state(this.opened ? "reconnecting" : "connecting");
    this.source = new EventSource("/v1/changes");
    this.source.onopen = () => {
      // Before the first one nothing can have been missed: the views ask when they are opened.
      if (this.opened) this.on.change(EVERYTHING);
      this.opened = true;
      this.on.state("live");
      this.heard();
    };
    this.source.addEventListener("bookmark", () => this.heard());
    this.source.addEventListener("change", (event) => {
      this.heard();
      const { seq, at_s, payload } = JSON.parse(event.data);
      this.on.change({ seq, at_s, ...payload });
    });
    this.source.onerror = () => {
      this.on.state("reconnecting");
      // A browser tries again by itself, unless the answer was an error.
      if (this.source?.readyState === EventSource.CLOSED) this.again();
    };
  }

  heard() {
    clearTimeout(this.silence);
    this.silence = setTimeout(() => this.start(), SILENT_MS);
  }

  again() {
    clearTimeout(this.timer);
    // If nobody is logged in any more, this is how the page learns it.
    get("/v1/session").catch(() => null);
    this.timer = setTimeout(() => this.start(), RETRY_MS);
  }

  stop() {
    clearTimeout(this.timer);
    clearTimeout(this.silence);
    this.source?.close();
    this.source = null;
  }
}

/** @type {Change} A change of which it is not known what it was. */
export const EVERYTHING = { seq: 0, at_s: 0, kinds: { "": 1 }, tasks: 1, reports: 1 };

/** What a change counts beside the kinds of events. */
const COUNTED = { tasks: true, reports: true };

/**
 * Whether a change is about one of these: prefixes of kinds of events, `tasks`, or `reports` of training.
 *
 * @param {Change} change
 * @param {string[]} topics
 * @returns {boolean}
 */
export function concerns(change, topics) {
  if (change.kinds[""]) return topics.length > 0;
  const kinds = Object.keys(change.kinds);
  return topics.some((topic) => (topic in COUNTED ? change[topic] > 0 : kinds.some((kind) => kind.startsWith(topic))));
}

const PAUSE_MS = 300;

/**
 * Calls of `fetch` one at a time, with pauses between them that grow with how long one takes. What is asked
 * for during a call or a pause, or while nobody looks at the page, is one call after it.
 */
export class Paced {
  /** @param {() => Promise<void>} fetch @param {number} [pause_ms] */
  constructor(fetch, pause_ms = PAUSE_MS) {
    this.fetch = fetch;
    this.pause_ms = pause_ms;
    this.wanted = false;
    this.busy = false;
    this.stopped = false;
    this.timer = 0;
    this.seen = () => this.go();
    document.addEventListener("visibilitychange", this.seen);
  }

  want() {
    this.wanted = true;
    this.go();
  }

  go() {
    if (this.wanted && !this.busy && !this.stopped && !document.hidden) this.run();
  }

  async run() {
    this.busy = true;
    this.wanted = false;
    const began = performance.now();
    await this.fetch();
    const took = performance.now() - began;
    this.timer = setTimeout(() => {
      this.busy = false;
      this.go();
    }, Math.max(this.pause_ms, 3 * took));
  }

  stop() {
    this.stopped = true;
    clearTimeout(this.timer);
    document.removeEventListener("visibilitychange", this.seen);
  }
}
