"""``make demo-elastic``: three jobs share the GPUs of a machine that has none, and one loses a replica.

Starts a cluster with eight GPUs that are only said to be there, and three elastic trainers, one after the
other. Everything is real but the time of a step, which is slept: processes, process groups, resizes,
commits, the scheduler's rounds. A replica is killed on the way. In the end stand the ledgers, a plot of who
had which GPUs, and the completion times beside those with equal shares: two GPUs for each job.
Ends with 0 if every ledger is exact, with 1 if not. For machines without GPUs.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo import Api, table
from reporting import write

import stoker
import stoker.train
from stoker.exceptions import NotFoundError, StokerError
from stoker_goodput.throughput import ThroughputParams
from stoker_train.elastic.records import Records

GPUS = 8
SHARE = GPUS // 3
BATCH = 32
THETA = ThroughputParams(0.02, 0.01, 0.03, 0.004, 0.01, 0.002, 1.5)
"""What a step takes; the trainers measure it, and the scheduler is told."""
LOOK_S = 0.5
KILL_S = 45.0
LIMIT_S = 600.0
COLORS = ("\033[44m", "\033[42m", "\033[45m")
PLOT_COLORS = ("#1f4e9c", "#3a9d5d", "#8e44ad")
LINE_S = 5.0


@dataclass
class Plan:
    """A job of the demo: ``steps`` to train, submitted at ``arrives_s``."""

    name: str
    arrives_s: float
    steps: int
    trainer: Any = None
    result: Any = None
    seen: dict[str, Any] = field(default_factory=dict)
    job: dict[str, Any] = field(default_factory=dict)
    start_s: float = 0.0
    """From its submission to its first replicas."""

    @property
    def replicas(self) -> int:
        """How many it trains with now."""
        return 0 if self.result is not None else int(self.seen.get("replicas", 0))

    def static_s(self, start_s: float) -> float:
        """The seconds that it would take with its third of the GPUs, in whole ones, from start to end."""
        return start_s + self.steps * float(THETA.step_time(1, SHARE, BATCH / SHARE))


def loop(ctx: Any, config: dict[str, int]) -> float:
    """Fit a line; a step takes what the profile says for the replicas that there are."""
    import torch

    torch.manual_seed(0)
    inputs = torch.randn(config["steps"] * BATCH, 16)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model = torch.nn.Linear(16, 1)
    ctx.state(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
    loader = ctx.loader(data)
    for _ in ctx.epochs(1):
        for features, targets in loader:
            began = time.perf_counter()
            loss = ((model(features) - targets) ** 2).mean()
            step_s = float(THETA.step_time(1, ctx.world_size, len(features)))
            time.sleep(max(0.0, step_s - (time.perf_counter() - began)))
            ctx.backward(loss)
            ctx.step(loss=loss)
    return float(ctx.metrics.loss)


class Screen:
    """The terminal: a view that is written over, or lines where it is a file."""

    def __init__(self, plans: list[Plan]) -> None:
        self._plans, self._live = plans, sys.stdout.isatty()
        self._lines, self._last_s = 0, -LINE_S

    def say(self, at_s: float, text: str) -> None:
        """Print what stays."""
        self._clear()
        print(f"{at_s:5.0f} s  {text}", flush=True)

    def show(self, at_s: float) -> None:
        """Draw who has which GPUs, and how far each job is."""
        if not self._live and at_s - self._last_s < LINE_S:
            return
        self._last_s = at_s
        self._clear()
        lines = [f"{at_s:5.0f} s  GPUs [{self._strip()}]"]
        if self._live:
            lines += [self._row(number, plan) for number, plan in enumerate(self._plans)]
            self._lines = len(lines)
        print("\n".join(lines), flush=True)

    def _strip(self) -> str:
        cells = ""
        for number, plan in enumerate(self._plans):
            cell = plan.name[0] * plan.replicas
            cells += f"{COLORS[number]}{cell}\033[0m" if self._live and cell else cell
        return cells + "·" * (GPUS - sum(plan.replicas for plan in self._plans))

    def _row(self, number: int, plan: Plan) -> str:
        step = int(plan.seen.get("steps", 0)) if plan.result is None else plan.steps
        full = 24 * step // plan.steps
        state = "done" if plan.result else plan.seen.get("phase", "to come" if not plan.job else "")
        bar = f"{COLORS[number]}{' ' * full}\033[0m{'·' * (24 - full)}"
        return f"  {plan.name} {bar} step {step:4}/{plan.steps}  {plan.replicas} GPUs  {state}"

    def _clear(self) -> None:
        if self._lines:
            print(f"\033[{self._lines}F\033[J", end="")
            self._lines = 0


def submit(plan: Plan, folder: Path) -> None:
    """Begin a job."""
    plan.trainer = stoker.train.ElasticTrainer(
        loop,
        name=f"{plan.name}-{os.getpid()}",
        config={"steps": plan.steps},
        scaling=stoker.train.Scaling(
            min_replicas=1, max_replicas=GPUS, base_batch=BATCH, adapt="replicas"
        ),
        checkpoint=stoker.train.Checkpoint(str(folder / plan.name), every=100, commit_every=10),
    )
    plan.trainer.submit()


def look(plan: Plan, api: Api, screen: Screen, at_s: float) -> None:
    """See how a job is; say it where its replicas have changed, or it has ended."""
    before = plan.replicas
    plan.job = api.get(f"/v1/jobs/{plan.trainer.job_id}")
    plan.seen = plan.trainer.progress()
    if plan.job["ended_at_s"] is not None:
        plan.result = plan.trainer.result(timeout_s=LIMIT_S)
        screen.say(at_s, f"{plan.name} has ended: {plan.result.error or f'step {plan.steps}'}")
    elif plan.replicas != before:
        plan.start_s = plan.start_s or time.time() - plan.job["created_at_s"]
        screen.say(at_s, f"{plan.name}: {before} -> {plan.replicas} GPUs")


def kill(plan: Plan, api: Api) -> str:
    """End the process of the last rank of a job, as a crash would; returns what was killed."""
    membership = Records(plan.trainer.job_id).membership()
    if membership is None or len(membership.members) < 2:
        return ""
    member = membership.members[-1]
    pid = api.get(f"/v1/actors/{member.actor_id}")["pid"]
    os.kill(pid, signal.SIGKILL)
    return f"process {pid}, rank {member.rank} of {plan.name}, is killed"


def run(plans: list[Plan], api: Api, folder: Path) -> list[tuple[float, list[int]]]:
    """Let the jobs come, and look until all have ended; returns who had how many GPUs when."""
    screen, seen, killed = Screen(plans), [], False
    began = time.monotonic()
    while any(plan.result is None for plan in plans):
        at_s = time.monotonic() - began
        if at_s > LIMIT_S:
            raise StokerError(f"the jobs have not ended after {LIMIT_S:g} s")
        for plan in plans:
            if plan.trainer is None and at_s >= plan.arrives_s:
                submit(plan, folder)
                screen.say(at_s, f"{plan.name} comes, with {plan.steps} steps")
            elif plan.trainer is not None and plan.result is None:
                look(plan, api, screen, at_s)
        if not killed and at_s > KILL_S:
            biggest = max(plans, key=lambda plan: plan.replicas)
            try:
                said = kill(biggest, api)
            except (NotFoundError, ProcessLookupError):
                said = ""  # the membership has just changed
            if said:
                killed = True
                screen.say(at_s, said)
        seen.append((at_s, [plan.replicas for plan in plans]))
        screen.show(at_s)
        time.sleep(LOOK_S)
    return seen


def plot(plans: list[Plan], seen: list[tuple[float, list[int]]], path: Path) -> str:
    """Draw who had how many GPUs when: a PNG, or text without matplotlib. Returns its path."""
    try:
        import matplotlib
    except ImportError:
        write(path.with_suffix(".txt"), as_text(plans, seen).encode())
        return str(path.with_suffix(".txt"))
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 3.5), dpi=120)
    times = [at_s for at_s, _ in seen]
    rows = list(zip(*(counts for _, counts in seen), strict=True))
    names = [plan.name for plan in plans]
    axes.stackplot(times, rows, labels=names, colors=PLOT_COLORS, step="post")
    axes.set(xlabel="seconds", ylabel="GPUs", title="Three elastic jobs", ylim=(0, GPUS))
    axes.legend(loc="upper right")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return str(path)


def as_text(plans: list[Plan], seen: list[tuple[float, list[int]]], width: int = 72) -> str:
    """Return a row of digits for each job: how many GPUs it had, over time."""
    step = max(1, len(seen) // width)
    picked = seen[::step]
    names = max(len(plan.name) for plan in plans)
    lines = [
        f"{plan.name:{names}} " + "".join(str(counts[number] or "·") for _, counts in picked)
        for number, plan in enumerate(plans)
    ]
    return "\n".join([*lines, f"{'':{names}} 0 s to {seen[-1][0]:.0f} s"]) + "\n"


def tell(plans: list[Plan]) -> bool:
    """Print what became of the jobs; returns whether all went well, to the last sample."""
    rows, total_s, total_static_s = [], 0.0, 0.0
    start_s = min(plan.start_s for plan in plans)
    for plan in plans:
        jct_s = plan.job["ended_at_s"] - plan.job["created_at_s"]
        static_s = plan.static_s(start_s)
        total_s, total_static_s = total_s + jct_s, total_static_s + static_s
        result = plan.result
        pauses = sorted(cost.pause_s for cost in result.resizes)
        rows.append(
            {
                "job": plan.name,
                "ledger": "exact" if result.ledger_ok else "; ".join(result.ledger_problems),
                "generations": result.generations,
                "pause": f"{pauses[len(pauses) // 2]:.2f} s" if pauses else "-",
                "jct": f"{jct_s:.0f} s",
                "static": f"{static_s:.0f} s",
            }
        )
    columns = {
        "JOB": "job", "LEDGER": "ledger", "GENERATIONS": "generations", "MEDIAN PAUSE": "pause",
        "JCT": "jct", f"WITH {SHARE} GPUS": "static",
    }  # fmt: skip
    print(f"\n{table(rows, columns)}")
    print(
        f"\nmean JCT {total_s / len(plans):.0f} s, {total_s / total_static_s:.2f} times that of {SHARE} GPUs "
        f"for each, which is computed: from the profile and the quickest start ({start_s:.0f} s), no loss"
    )
    return all(plan.result.ledger_ok and not plan.result.error for plan in plans)


def main() -> int:
    """Run the demo; returns the exit code."""
    parser = argparse.ArgumentParser(description="Three elastic jobs share eight GPUs.")
    parser.add_argument("--scale", type=float, default=1.0, help="of all steps: 0.5 takes a minute")
    parser.add_argument("--out", default="runs/demo-elastic", help="for plot and checkpoints")
    args = parser.parse_args()
    folder = Path(args.out).resolve() / time.strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    # The scheduler looks more often than a real cluster's, whose jobs last for hours.
    os.environ.setdefault("STOKER_ELASTIC_INTERVAL_S", "5")
    os.environ.setdefault("STOKER_ELASTIC_MIN_INTERVAL_S", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    plans = [
        Plan(name, arrives_s, max(20, round(steps * args.scale)))
        for name, arrives_s, steps in (("large", 0, 900), ("small", 15, 200), ("medium", 25, 500))
    ]
    cluster = stoker.init(num_cpus=4, num_gpus=GPUS, log_to_driver=False)
    try:
        print(
            f"cluster: {cluster.address}, {GPUS} GPUs; in another terminal: stoker plan --elastic\n"
        )
        seen = run(plans, Api(cluster), folder)
        well = tell(plans)
        print(f"\n{as_text(plans, seen)}plot: {plot(plans, seen, folder / 'gpus.png')}")
        return 0 if well else 1
    finally:
        stoker.shutdown()


if __name__ == "__main__":
    sys.exit(main())
