// Logging in with a token.

import { h } from "../dom.js";
import { enter } from "../session.js";
import { message } from "../ui.js";

/**
 * @param {string} reason Why it is shown, if that has to be said.
 * @param {() => void} entered
 */
export function login(reason, entered) {
  async function submit(event) {
    event.preventDefault();
    const form = event.target;
    const said = form.querySelector("[role=alert]");
    said.textContent = "";
    form.querySelector("button").disabled = true;
    try {
      await enter(form.elements.token.value);
      entered();
    } catch (problem) {
      said.textContent = problem.message;
      form.querySelector("button").disabled = false;
      form.elements.token.select();
    }
  }
  return [
    h("h1", null, h("img", { src: "/assets/icon.svg", alt: "", width: "28", height: "28" }), " Stoker"),
    reason && h("div", { class: "notice" }, message(reason)),
    h("form", { onsubmit: submit },
      h("label", { for: "token" }, "Token"),
      h("input", { id: "token", name: "token", type: "password", autocomplete: "current-password", required: true, spellcheck: "false" }),
      h("button", { class: "primary" }, "Log in"),
      h("p", { class: "problem-text", role: "alert", mount: () => undefined })),
    h("p", { class: "muted" }, "The command ", h("code", null, "stoker dashboard"), " opens this page and logs in. A token for a person is made by ",
      h("code", null, "stoker token create NAME --role viewer"), "."),
  ];
}
