// The page: who looks on, the frame around the views, and what keeps them up to date.

import { onSignedOut } from "./api.js";
import { h, patch } from "./dom.js";
import { tick } from "./format.js";
import { help, listenToKeys } from "./keys.js";
import { Live } from "./live.js";
import { pastBar } from "./past.js";
import { place, to } from "./router.js";
import { searchBox } from "./search.js";
import * as session from "./session.js";
import { applyTheme, followSystem, nextTheme, theme } from "./theme.js";
import { problemBox } from "./ui.js";
import { Stage } from "./view.js";
import { actor } from "./views/actor.js";
import { actors } from "./views/actors.js";
import { attempt } from "./views/attempt.js";
import { control } from "./views/control.js";
import { events } from "./views/events.js";
import { functionView } from "./views/function.js";
import { group } from "./views/group.js";
import { groups } from "./views/groups.js";
import { job } from "./views/job.js";
import { jobs } from "./views/jobs.js";
import { kernels } from "./views/kernels.js";
import { login } from "./views/login.js";
import { node } from "./views/node.js";
import { nodes } from "./views/nodes.js";
import { objects } from "./views/objects.js";
import { overview } from "./views/overview.js";
import { queue } from "./views/queue.js";
import { queues } from "./views/queues.js";
import { tasks } from "./views/tasks.js";
import { timeline } from "./views/timeline.js";
import { training, trainings } from "./views/training.js";

/** The views by the first part of their address: of all, and of one. `key` comes after `g`. */
const VIEWS = [
  { key: "o", name: "", title: "Overview", all: overview },
  { key: "n", name: "nodes", title: "Nodes", all: nodes, one: node },
  { key: "j", name: "jobs", title: "Jobs", all: jobs, one: job },
  { key: "t", name: "tasks", title: "Tasks", all: tasks, one: attempt },
  { key: "a", name: "actors", title: "Actors", all: actors, one: actor },
  { key: "p", name: "groups", title: "Groups", all: groups, one: group },
  { key: "q", name: "queues", title: "Queues", all: queues, one: queue },
  { key: "m", name: "objects", title: "Memory", all: objects },
  { key: "r", name: "training", title: "Training", all: trainings, one: training },
  { key: "l", name: "timeline", title: "Timeline", all: timeline },
  { key: "e", name: "events", title: "Events", all: events },
  { key: "k", name: "kernels", title: "Kernels", all: kernels },
  { key: "c", name: "control", title: "Control plane", all: control },
];
const STATES = { connecting: "connecting…", live: "live", reconnecting: "reconnecting…" };

function find(path) {
  const [name = "", id, ...more] = path;
  if (name === "functions" && id && !more.length) return { view: functionView, id };
  const views = VIEWS.find((one) => one.name === name);
  if (!views || more.length || (id && !views.one)) return null;
  return id ? { view: views.one, id } : { view: views.all, id: "" };
}

/** The frame: header, navigation and the stage of the views. It is made once for each session. */
class Frame {
  constructor(body) {
    patch(body, [
      h("a", { class: "skip", href: "#main", onclick: (event) => { event.preventDefault(); this.main.focus(); }, key: "skip" }, "To the content"),
      h("header", { class: "top", key: "top" },
        h("a", { class: "brand", href: "#/", mount: (element) => brand(element) }),
        h("div", { class: "search", role: "search", mount: (element) => { this.search = searchBox(element); } }),
        h("div", { class: "top-right", mount: (element) => { this.right = element; } })),
      h("nav", { class: "side", key: "side", "aria-label": "Views", mount: (element) => { this.side = element; } }),
      h("div", { class: "past", key: "past", role: "region", "aria-label": "Moment", mount: (element) => { this.past = element; } }),
      h("main", { id: "main", key: "main", tabindex: "-1", mount: (element) => { this.main = element; } }),
    ]);
    this.state = "connecting";
    this.choosing = false;
    this.stage = new Stage(this.main, find);
    this.live = new Live({ change: (change) => this.stage.changed(change), state: (state) => this.connected(state) });
    this.moved = () => this.open();
    this.closed = () => this.choose(false);
  }

  start() {
    addEventListener("hashchange", this.moved);
    addEventListener("past-closed", this.closed);
    this.live.start();
    this.open();
  }

  stop() {
    removeEventListener("hashchange", this.moved);
    removeEventListener("past-closed", this.closed);
    this.live.stop();
    this.stage.close();
  }

  open() {
    this.drawSide();
    this.drawRight();
    pastBar(this.past, { choosing: this.choosing });
    this.stage.open();
  }

  choose(on) {
    this.choosing = on;
    pastBar(this.past, { choosing: on });
  }

  connected(state) {
    this.state = state;
    this.drawRight();
  }

  drawSide() {
    const [name = ""] = place().path;
    const present = name === "functions" ? "tasks" : name;
    patch(this.side, h("ul", null, VIEWS.map((one) => h("li", { key: one.name },
      h("a", { href: to(one.name ? [one.name] : []), "aria-current": one.name === present ? "page" : undefined, title: `g ${one.key}` }, one.title)))));
  }

  drawRight() {
    const { user, role } = session.current();
    patch(this.right, [
      h("span", { class: `connection ${this.state}`, role: "status", key: "connection" }, STATES[this.state]),
      h("button", {
        type: "button", key: "past", "aria-disabled": session.seesAll() ? undefined : "true",
        title: session.seesAll() ? "Show the cluster as it was" : "Earlier states are shown to roles admin and viewer only",
        onclick: () => session.seesAll() && this.choose(!this.choosing),
      }, "time travel"),
      h("button", { type: "button", key: "theme", title: "Colours: as the system, dark, or light", onclick: () => { nextTheme(); this.drawRight(); } }, theme()),
      h("button", { type: "button", key: "keys", "aria-label": "Keys", title: "Keys", onclick: () => help(VIEWS) }, "?"),
      h("span", { class: "who", key: "who", title: `role ${role}` }, user, " ", h("span", { class: "muted" }, role)),
      h("button", { type: "button", key: "out", onclick: signOut }, "log out"),
    ]);
  }
}

function brand(element) {
  patch(element, [h("img", { src: "/assets/icon.svg", alt: "", width: "20", height: "20" }), "Stoker"]);
}

/** @type {Frame | null} */
let frame = null;

async function signOut() {
  await session.leave().catch(() => session.forget());
  showLogin("");
}

function showLogin(reason) {
  frame?.stop();
  frame = null;
  document.title = "Log in · Stoker";
  patch(document.body, h("main", { class: "login", key: "login" }, login(reason, showFrame)));
  document.querySelector("input")?.focus();
}

function showFrame() {
  frame = new Frame(document.body);
  frame.start();
}

async function start() {
  applyTheme();
  followSystem();
  onSignedOut(() => {
    session.forget();
    if (frame) showLogin("the session has ended\nlog in again to go on where you were");
  });
  listenToKeys(VIEWS, () => frame?.search);
  setInterval(tick, 1000);
  try {
    if (await session.restore()) showFrame();
    else showLogin("");
  } catch (problem) {
    if (problem.status) showLogin(problem.message);
    else wait(problem);
  }
}

function wait(problem) {
  patch(document.body, h("main", { class: "login" }, h("h1", null, "Stoker"), problemBox(problem)));
  setTimeout(() => location.reload(), 3000);
}

start();
