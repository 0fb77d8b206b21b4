// Questions before something is done, in a dialog of the browser.

import { h, patch } from "./dom.js";
import { problemBox } from "./ui.js";

/**
 * Ask, and do it; the dialog stays open with the reason if that fails.
 *
 * @param {object} question
 * @param {string} question.title
 * @param {any} question.text
 * @param {string} question.action What the button says.
 * @param {Array<{name: string, label: string, value?: string, type?: string}>} [question.fields]
 * @param {(values: Record<string, string>) => Promise<any>} question.act
 */
export function ask({ title, text, action, fields = [], act }) {
  const values = Object.fromEntries(fields.map((field) => [field.name, field.value ?? ""]));
  const draw = (state) => [
    h("h2", { id: "question" }, title),
    h("div", { class: "dialog-text" }, text),
    fields.map((field) => h("label", { class: "field", key: field.name }, field.label,
      h("input", { type: field.type ?? "text", value: field.value ?? "", autocomplete: "off", oninput: (event) => { values[field.name] = event.target.value; } }))),
    state.problem && problemBox(state.problem),
    h("div", { class: "dialog-buttons" },
      h("button", { type: "button", onclick: () => dialog.close(), key: "no" }, "Cancel"),
      h("button", { type: "button", class: "danger", disabled: state.busy, onclick: run, key: "yes" }, action)),
  ];
  const dialog = opened("question", draw({}));
  async function run() {
    patch(dialog, draw({ busy: true }));
    try {
      await act(values);
      dialog.close();
    } catch (problem) {
      patch(dialog, draw({ problem }));
    }
  }
}

/** Show a dialog with a title and something in it. @param {string} title @param {any} content */
export function tell(title, content) {
  const dialog = opened("question", [
    h("h2", { id: "question" }, title),
    content,
    h("div", { class: "dialog-buttons" }, h("button", { type: "button", onclick: () => dialog.close() }, "Close")),
  ]);
}

function opened(labelId, content) {
  const dialog = document.createElement("dialog");
  dialog.setAttribute("aria-labelledby", labelId);
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  patch(dialog, content);
  dialog.showModal();
  return dialog;
}
