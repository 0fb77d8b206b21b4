"""``make demo``: a cluster on this machine trains a small model, and tells about it over HTTP.

Starts a cluster, runs ``train_gpt.py`` on it as the job, shows the curve, the checkpoint and samples of
text, and reads the job, its tasks, actors and nodes back from the HTTP API when the job has ended. The
cluster ends with the demo. Ends with 0 if the loss fell below the target, with 1 if not.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import train_gpt

import stoker
from stoker.exceptions import StokerError
from stoker.launch import start_local

TARGET = 2.5  # nats per byte
OUT = "runs/demo"
SETTLE_S = 5.0
TERMINAL = {"FINISHED", "FAILED", "CANCELLED"}


class Api:
    """The cluster's HTTP API, by the standard library alone: a URL and a bearer token."""

    def __init__(self, cluster: stoker.ClusterInfo) -> None:
        self.url = cluster.address
        self._token = cluster.token
        self._token_file = Path(cluster.session_dir) / "token"

    @property
    def token_at(self) -> str:
        """Where a reader finds the token: its file, or the variable."""
        return str(self._token_file) if self._token_file.exists() else "$STOKER_TOKEN"

    def get(self, path: str) -> Any:
        """Return the JSON that ``GET path`` answers."""
        headers = {"Authorization": f"Bearer {self._token}"}
        request = urllib.request.Request(self.url + path, headers=headers)
        with urllib.request.urlopen(request, timeout=10) as reply:
            return json.load(reply)

    def curl(self, path: str) -> str:
        """Return the command that does the same, without showing the token."""
        if self._token_file.exists():
            token = f"$(cat {shlex.quote(str(self._token_file))})"
        else:
            token = "$STOKER_TOKEN"
        return f'curl -s -H "Authorization: Bearer {token}" {shlex.quote(self.url + path)}'


def table(rows: list[dict[str, Any]], columns: dict[str, Any]) -> str:
    """Lay out rows: ``columns`` maps a heading to a key, or to a function of the row."""
    lines = [list(columns)]
    for row in rows:
        cells = (source(row) if callable(source) else row[source] for source in columns.values())
        lines.append([str(cell) for cell in cells])
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    padded = (zip(line, widths, strict=True) for line in lines)
    return "\n".join("  " + "  ".join(c.ljust(w) for c, w in line).rstrip() for line in padded)


def lasted(row: dict[str, Any]) -> str:
    """How long it ran, or has run so far."""
    if not row["started_at_s"]:
        return "-"
    return f"{(row['ended_at_s'] or time.time()) - row['started_at_s']:.1f} s"


def amounts(resources: dict[str, float]) -> str:
    """Resources for people."""
    gib = 2**30
    return ", ".join(
        f"{value / gib:.1f} GiB memory" if name == "memory" else f"{value:g} {name}"
        for name, value in sorted(resources.items())
    )


def settled_tasks(api: Api, path: str) -> list[dict[str, Any]]:
    """Read the tasks once the last ends have been recorded: that takes a moment."""
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        tasks: list[dict[str, Any]] = api.get(path)["items"]
        over = tasks and all(task["state"] in TERMINAL for task in tasks)
        if over or time.monotonic() > deadline_s:
            return tasks
        time.sleep(0.1)


def show_state(api: Api, job_id: str) -> None:
    """Print the ended job, its tasks and actors, and the nodes, as the HTTP API tells them."""
    by_job = urllib.parse.urlencode({"job_id": job_id})
    paths = {
        "job": f"/v1/jobs/{job_id}",
        "tasks": f"/v1/tasks?{by_job}",
        "actors": f"/v1/actors?{by_job}",
        "nodes": "/v1/nodes",
    }
    tasks = settled_tasks(api, paths["tasks"])
    columns: dict[str, dict[str, Any]] = {
        "job": {
            "JOB": "job_id", "STATE": "state", "RAN": lasted, "PID": "pid",
            "ENTRYPOINT": lambda job: Path(job["entrypoint"].split()[0]).name,
        },
        "tasks": {
            "TASK": "task_id", "NAME": "name", "STATE": "state", "ATTEMPT": "attempt",
            "RAN": lasted, "WORKER": "worker_id",
        },
        "actors": {
            "ACTOR": "actor_id", "CLASS": "class_name", "STATE": "state", "PID": "pid",
            "NEEDS": lambda actor: amounts(actor["resources"]),
            "WHY": lambda actor: (actor["death_cause"] or {}).get("message", "")[:60],
        },
        "nodes": {
            "NODE": "node_id", "STATE": "state", "HAS": lambda node: amounts(node["resources"]),
            "WORKERS": lambda node: f"{node['usage'].get('workers', 0):g}",
            "URL": "url",
        },
    }  # fmt: skip
    for title, path in paths.items():
        reply = api.get(path)
        rows = tasks if title == "tasks" else reply.get("items", [reply])
        print(f"\nGET {path}\n{table(rows, columns[title])}")


def main() -> int:
    """Run the demo; returns the exit code."""
    parser = argparse.ArgumentParser(
        description="Train a small model on a cluster of this machine."
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=train_gpt.Config.steps)
    parser.add_argument("--out", default=OUT, help="for the curve, the checkpoint and the metrics")
    given = parser.parse_args()
    args = train_gpt.arguments().parse_args(
        ["--workers", str(given.workers), "--steps", str(given.steps), "--out", given.out]
    )
    # `stoker.init()` alone would do for a program; this cluster is to outlive the job, which is looked at
    # when it has ended.
    with start_local(num_cpus=max(2, given.workers)) as cluster:
        try:
            return run(cluster.info.gcs_url, args)
        finally:
            stoker.shutdown()


def run(address: str, args: argparse.Namespace) -> int:
    """Train on the cluster at ``address``, and show what came of it; returns the exit code."""
    began = time.monotonic()
    cluster = stoker.init(address)
    api = Api(cluster)
    print(f"cluster: {cluster.address} (HTTP API)")
    print(f"job: {cluster.job_id}; while it runs, ask in another terminal:")
    print(f"  {api.curl(f'/v1/jobs/{cluster.job_id}')}")
    print(f"or watch its curves in a browser, and log in with the token of {api.token_at}:")
    print(f"  {cluster.address}/#/training/{cluster.job_id}\n", flush=True)
    try:
        metrics = train_gpt.run(train_gpt.config_of(args), args)
    except (train_gpt.TrainingFailed, StokerError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    print("\nwhat it writes:")
    for sample in metrics["samples"]:
        print("\n".join(f"  | {line}" for line in sample.splitlines()) + "\n")
    losses, held_out = metrics["losses"], metrics["validation_loss"]
    last = sum(losses[-25:]) / len(losses[-25:])
    print(f"loss: {losses[0]:.3f} -> {last:.3f} nats per byte; on files held out: {held_out:.3f}")
    print(f"curve: {metrics['curve'] or 'not drawn'}\ncheckpoint: {metrics['checkpoint']}")
    stoker.shutdown()  # the job ends here
    print(f"\nwhat the HTTP API says, {time.monotonic() - began:.0f} s later:")
    show_state(api, cluster.job_id)
    stoker_command = shlex.quote(str(Path(sys.executable).with_name("stoker")))
    print(f"\nThis cluster ends now. One that stays: {stoker_command} start --head")
    if max(last, held_out) >= TARGET:
        print(f"demo: the loss is not below {TARGET} nats per byte", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
