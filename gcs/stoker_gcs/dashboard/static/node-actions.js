// What an operator can do with a node.

import { path, send } from "./api.js";
import { ask } from "./dialog.js";
import { isAdmin } from "./session.js";
import { button } from "./ui.js";

/** @param {any} node @param {() => void} done */
export function releaseButton(node, done) {
  const refused = isAdmin() ? "" : "only an admin may release a GPU";
  return (device) => device.quarantine && button("release", { refused, onclick: () => ask({
    title: `Put GPU ${device.index} of ${node.hostname} back to use?`,
    text: `It was quarantined: ${device.quarantine}`,
    action: "Release",
    act: () => send("POST", path`/v1/nodes/${node.node_id}/gpus/${String(device.index)}/release`).then(done),
  }) });
}

/** @param {any} node @param {() => void} done */
export function nodeButtons(node, done) {
  if (node.state === "DEAD") return null;
  const refused = isAdmin() ? "" : "only an admin may change nodes";
  const order = (name, body) => send("POST", path`/v1/nodes/${node.node_id}/${name}`, body).then(done);
  return [
    node.cordon || node.drain
      ? button("uncordon", { refused, onclick: () => ask({
        title: `Uncordon ${node.hostname}?`,
        text: `New work is placed on ${node.node_id} again.`,
        action: "Uncordon",
        act: () => order("uncordon"),
      }) })
      : button("cordon", { refused, onclick: () => ask({
        title: `Cordon ${node.hostname}?`,
        text: `Nothing more is placed on ${node.node_id}; what runs there goes on.`,
        action: "Cordon",
        fields: [{ name: "reason", label: "Reason, for others" }],
        act: ({ reason }) => order("cordon", { reason }),
      }) }),
    !node.drain && button("drain", { refused, tone: "danger", onclick: () => ask({
      title: `Drain ${node.hostname}?`,
      text: `${node.node_id} is emptied, and then leaves the cluster. At the deadline what is left there is ended.`,
      action: "Drain",
      fields: [
        { name: "deadline_s", label: "Deadline in seconds", value: "300", type: "number" },
        { name: "reason", label: "Reason, for others" },
      ],
      act: ({ deadline_s, reason }) => order("drain", { deadline_s: Number(deadline_s), reason }),
    }) }),
  ];
}
