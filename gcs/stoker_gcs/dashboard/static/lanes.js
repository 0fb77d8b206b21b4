// A canvas with a lane for each worker: what ran there when. It zooms by asking for another range.

import { absolute, clock, duration, percent } from "./format.js";

const LANE = 22;
const TOP = 24;
const LEFT = 190;
const LEAST_S = 1e-4;
const HUES = [212, 28, 152, 284, 46, 330, 184, 96];

/**
 * @typedef {{node_id: string, worker_id: string, actor_id: string, name: string, spans: any[] | null, busy: number[] | null, count: number}} Lane
 * @typedef {{from_s: number, to_s: number, bucket_s: number, first_s: number, last_s: number, lanes: Lane[], names: string[], states: string[], hostnames: Record<string, string>}} Shown
 */

/** What a lane is called: an actor by its name or class, else the worker. @param {Lane} lane */
export function laneName(lane) {
  return lane.name ? `${lane.name} ${lane.actor_id.slice(0, 6)}` : lane.worker_id;
}

/** @param {Shown} data @param {string} id */
export function nodeName(data, id) {
  return data.hostnames[id] ? `${data.hostnames[id]} ${id}` : id || "no node";
}

/** The rows of the drawing: a node, then its lanes. */
function rowsOf(data) {
  const rows = [];
  let node = null;
  for (const lane of data.lanes) {
    if (lane.node_id !== node) rows.push({ node: nodeName(data, lane.node_id) });
    node = lane.node_id;
    rows.push({ lane });
  }
  return rows;
}

/** The drawing, and the hand on it. */
export class Lanes {
  /**
   * @param {HTMLCanvasElement} canvas
   * @param {object} on
   * @param {(from_s: number, to_s: number) => void} on.range Asks for another part of the time.
   * @param {(task_id: string, attempt: number) => void} on.open
   * @param {(text: string) => void} on.tell What is under the pointer.
   */
  constructor(canvas, on) {
    this.canvas = canvas;
    this.on = on;
    /** @type {Shown | null} */
    this.data = null;
    this.rows = [];
    this.from = 0;
    this.to = 1;
    this.frame = 0;
    this.pointer = null;
    this.drag = null;
    this.asked = 0;
    canvas.onwheel = (event) => this.wheel(event);
    canvas.onpointerdown = (event) => this.down(event);
    canvas.onpointermove = (event) => this.move(event);
    canvas.onpointerup = (event) => this.up(event);
    canvas.onpointerleave = () => this.away();
    canvas.onkeydown = (event) => this.key(event);
    this.sized = new ResizeObserver(() => this.want());
    this.sized.observe(canvas.parentElement);
    this.themed = () => this.want();
    addEventListener("theme-changed", this.themed);
  }

  stop() {
    this.sized.disconnect();
    cancelAnimationFrame(this.frame);
    clearTimeout(this.asked);
    removeEventListener("theme-changed", this.themed);
  }

  /** @param {Shown} data */
  show(data) {
    // A hand that moves on is ahead of the answer.
    if (!this.drag && !this.asked) [this.from, this.to] = [data.from_s, data.to_s];
    this.data = data;
    this.rows = rowsOf(data);
    this.want();
  }

  want() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.draw());
  }

  get width() {
    return Math.max(1, this.canvas.clientWidth - LEFT);
  }

  x(at_s) {
    return LEFT + ((at_s - this.from) / (this.to - this.from)) * this.width;
  }

  time(x) {
    return this.from + ((x - LEFT) / this.width) * (this.to - this.from);
  }

  zoom(factor, around = (this.from + this.to) / 2) {
    const whole = this.data ? Math.max(1, (this.data.last_s - this.data.first_s) * 4) : Infinity;
    const length = Math.min(whole, Math.max(LEAST_S, (this.to - this.from) * factor));
    const share = (around - this.from) / (this.to - this.from);
    this.set(around - share * length, around - share * length + length);
  }

  set(from, to) {
    [this.from, this.to] = [from, to];
    this.want();
    clearTimeout(this.asked);
    this.asked = setTimeout(() => {
      this.asked = 0;
      this.on.range(from, to);
    }, 150);
  }

  wheel(event) {
    if (!event.ctrlKey && Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      const moved = (event.deltaX / this.width) * (this.to - this.from);
      this.set(this.from + moved, this.to + moved);
    } else if (event.ctrlKey || event.shiftKey || event.altKey || this.canvas === document.activeElement) {
      this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.time(event.offsetX));
    } else return; // The page scrolls.
    event.preventDefault();
  }

  down(event) {
    this.drag = { x: event.offsetX, from: this.from, to: this.to, moved: false };
    this.canvas.setPointerCapture(event.pointerId);
  }

  move(event) {
    this.pointer = { x: event.offsetX, y: event.offsetY };
    if (this.drag) {
      const by = event.offsetX - this.drag.x;
      if (Math.abs(by) > 3) this.drag.moved = true;
      const moved = (by / this.width) * (this.drag.to - this.drag.from);
      if (this.drag.moved) this.set(this.drag.from - moved, this.drag.to - moved);
    }
    const found = this.at(event.offsetX, event.offsetY);
    this.canvas.style.cursor = found?.span ? "pointer" : "grab";
    this.on.tell(found ? this.words(found) : "");
    this.want();
  }

  up(event) {
    const moved = this.drag?.moved;
    this.drag = null;
    if (moved) return;
    const found = this.at(event.offsetX, event.offsetY);
    if (found?.span) this.on.open(found.span[4], found.span[5]);
    else if (found?.bucket !== undefined) this.zoom(0.25, this.time(event.offsetX));
  }

  away() {
    this.pointer = null;
    this.on.tell("");
    this.want();
  }

  key(event) {
    const step = (this.to - this.from) / 5;
    const acts = {
      "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2),
      0: () => this.all(),
      ArrowLeft: () => this.set(this.from - step, this.to - step),
      ArrowRight: () => this.set(this.from + step, this.to + step),
    };
    if (!acts[event.key]) return;
    acts[event.key]();
    event.preventDefault();
    event.stopPropagation();
  }

  all() {
    if (!this.data) return;
    [this.from, this.to] = [this.data.first_s, this.data.last_s];
    this.on.range(null, null);
  }

  /** What is at a point of the canvas. */
  at(x, y) {
    const lane = this.rows[Math.floor((y - TOP) / LANE)]?.lane;
    if (!lane || y < TOP) return null;
    if (x < LEFT) return { lane };
    const at_s = this.time(x);
    if (!lane.spans) {
      const bucket = Math.floor((at_s - this.data.from_s) / this.data.bucket_s);
      return bucket >= 0 && bucket < (lane.busy?.length ?? 0) ? { lane, bucket } : { lane };
    }
    const slack = (this.to - this.from) / this.width;
    const span = lane.spans.findLast(([start, end]) => start - slack <= at_s && at_s <= end + slack);
    return { lane, span };
  }

  /** @param {{lane: Lane, span?: any, bucket?: number}} found */
  words({ lane, span, bucket }) {
    if (span) {
      const [start, end, name, state] = span;
      const runs = this.data.states[state] === "RUNNING";
      const took = runs ? `runs since ${clock(start)}` : `${duration(end - start)} from ${clock(start, { millis: true })}`;
      return `${this.data.names[name]} · ${this.data.states[state]} · ${took} · ${span[4]}${span[5] ? `, attempt ${span[5]}` : ""}`;
    }
    const worker = `${laneName(lane)} on ${nodeName(this.data, lane.node_id)}, ${lane.count} in this range`;
    return bucket === undefined ? worker : `${worker} · ${percent(lane.busy[bucket])} busy around ${clock(this.data.from_s + bucket * this.data.bucket_s)} · click to zoom in`;
  }

  draw() {
    if (!this.data) return;
    const style = getComputedStyle(this.canvas);
    this.colors = Object.fromEntries(["text", "muted", "line", "bad", "accent", "panel"].map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    this.dark = style.getPropertyValue("--dark").trim() === "1";
    const height = TOP + this.rows.length * LANE;
    const ratio = devicePixelRatio || 1;
    const width = this.canvas.parentElement.clientWidth;
    this.canvas.style.height = `${height}px`;
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(height * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
    }
    const pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = `12px ${style.fontFamily}`;
    pen.textBaseline = "middle";
    this.drawAxis(pen, width, height);
    this.rows.forEach((row, index) => row.lane && this.drawLane(pen, row.lane, TOP + index * LANE, width));
    this.drawNames(pen);
    this.drawPointer(pen, height);
  }

  drawAxis(pen, width, height) {
    const step = niceStep((this.to - this.from) / Math.max(2, this.width / 110));
    pen.fillStyle = this.colors.muted;
    pen.strokeStyle = this.colors.line;
    for (let at = Math.ceil(this.from / step) * step; at < this.to; at += step) {
      const x = this.x(at);
      pen.beginPath();
      pen.moveTo(x, TOP - 6);
      pen.lineTo(x, height);
      pen.stroke();
      if (x < width - 60) pen.fillText(step >= 86_400 ? absolute(at).slice(0, 10) : clock(at, { millis: step < 1 }), x + 4, TOP / 2);
    }
  }

  drawLane(pen, lane, y, width) {
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, y, width - LEFT, LANE);
    pen.clip();
    if (lane.spans) for (const span of lane.spans) this.drawSpan(pen, span, y);
    else this.drawBusy(pen, lane.busy ?? [], y);
    pen.restore();
  }

  drawSpan(pen, [start, end, name, state], y) {
    const from = this.x(start);
    const to = Math.max(from + 1, this.x(end));
    const wide = to - from;
    const failed = this.data.states[state] === "FAILED";
    pen.fillStyle = this.colorOf(name);
    pen.fillRect(from, y + 2, wide, LANE - 4);
    if (failed) {
      // A failure is told by its form, too: a bar below, and a cross where there is room.
      pen.fillStyle = this.colors.bad;
      pen.fillRect(from, y + LANE - 7, wide, 5);
    }
    if (this.data.states[state] === "RUNNING") {
      pen.fillStyle = this.colors.accent;
      pen.fillRect(to - 2, y + 2, 2, LANE - 4);
    }
    if (wide < 40) return;
    pen.save();
    pen.beginPath();
    pen.rect(from, y, wide - 4, LANE);
    pen.clip();
    pen.fillStyle = this.dark ? "#fff" : "#111";
    pen.fillText(`${failed ? "✕ " : ""}${this.data.names[name]}`, Math.max(from, LEFT) + 4, y + LANE / 2);
    pen.restore();
  }

  drawBusy(pen, busy, y) {
    pen.fillStyle = this.colors.accent;
    busy.forEach((fraction, index) => {
      if (fraction <= 0) return;
      const at = this.data.from_s + index * this.data.bucket_s;
      const tall = Math.max(1, fraction * (LANE - 4));
      pen.fillRect(this.x(at), y + LANE - 2 - tall, Math.max(1, this.x(at + this.data.bucket_s) - this.x(at) + 0.5), tall);
    });
  }

  drawNames(pen) {
    this.rows.forEach(({ node, lane }, index) => {
      const y = TOP + index * LANE + LANE / 2;
      pen.save();
      pen.beginPath();
      pen.rect(0, y - LANE / 2, lane ? LEFT - 8 : LEFT + this.width, LANE);
      pen.clip();
      pen.fillStyle = lane ? this.colors.text : this.colors.muted;
      pen.fillText(lane ? laneName(lane) : node, lane ? 14 : 4, y);
      pen.restore();
      pen.strokeStyle = this.colors.line;
      pen.beginPath();
      pen.moveTo(0, y + LANE / 2);
      pen.lineTo(LEFT + this.width, y + LANE / 2);
      pen.stroke();
    });
  }

  drawPointer(pen, height) {
    if (!this.pointer || this.pointer.x < LEFT) return;
    pen.strokeStyle = this.colors.muted;
    pen.beginPath();
    pen.moveTo(this.pointer.x, TOP - 6);
    pen.lineTo(this.pointer.x, height);
    pen.stroke();
  }

  colorOf(name) {
    // The same function has the same colour wherever it is seen.
    const hue = HUES[hashOf(this.data.names[name]) % HUES.length];
    return this.dark ? `hsl(${hue} 45% 36%)` : `hsl(${hue} 65% 78%)`;
  }
}

function hashOf(text) {
  let hash = 0;
  for (let index = 0; index < text.length; index += 1) hash = (hash * 31 + text.charCodeAt(index)) >>> 0;
  return hash;
}

const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 21_600, 43_200, 86_400];

/** A step between the marks of the axis that people like to read, of at least so many seconds. */
function niceStep(least) {
  if (least < 1) return 10 ** Math.ceil(Math.log10(least));
  return STEPS.find((step) => step >= least) ?? Math.ceil(least / 86_400) * 86_400;
}
