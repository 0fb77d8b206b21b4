"""What statistics, ledger and commits cost in a step of ``train_gpt.py``, beside the step of its own.

Two models of the same size in the same two processes, in turn: rounds of steps by the context, and rounds of
the same steps by DistributedDataParallel, clipping, optimizer and the mean of the loss, as ``train_gpt.py``
has them. A round is one interval of commits or more, so that each has its part of them. CPU seconds of the
process are less noisy than the clock on a machine that others use, too. Least noisy are the CPU
seconds of the loop's thread in the parts themselves, timed one by one: ``gpt_step_parts``.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from benchmarks.elastic_training.running import COMMIT_EVERY, WAIT_S, checked, cluster, running
from benchmarks.results import Row

BATCH = 32
BLOCK = 128
ROUND = COMMIT_EVERY
PARTS = {
    "statistics": (
        "meter.begin",
        "meter.local_square",
        "meter.before_optimizer",
        "meter.end",
        "_row",
        "_agree",
    ),
    "ledger": ("_count",),
    "commit": ("commit_if_due",),
}
"""The methods of :class:`stoker_train.elastic.replica.steps.Steps` that train_gpt.py has nothing like."""
NAMES = ("elastic", "plain")


class Sequences:
    """``steps`` batches of random bytes: (block + 1,) int64 each sample."""

    def __init__(self, steps: int) -> None:
        import torch

        generator = torch.Generator().manual_seed(0)
        self._rows = torch.randint(0, 256, (64, BLOCK + 1), generator=generator)
        self._length = steps * BATCH

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> Any:
        return self._rows[number % len(self._rows)]


def _gpt() -> Any:
    import torch

    from stoker_kernels.models.gpt import GPT, GPTConfig

    torch.manual_seed(0)
    return GPT(GPTConfig(layers=4, heads=4, dim=128, block_size=BLOCK))


def time_parts(steps: Any) -> dict[str, float]:
    """Have the parts of steps timed; returns the CPU seconds of each, which grow with every step."""
    took = dict.fromkeys(PARTS, 0.0)

    def timed(part: str, method: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            began_s = time.thread_time()
            try:
                return method(*args, **options)
            finally:
                took[part] += time.thread_time() - began_s

        return call

    for part, names in PARTS.items():
        for name in names:
            owner, _, last = name.rpartition(".")
            one = getattr(steps, owner) if owner else steps
            setattr(one, last, timed(part, getattr(one, last)))
    return took


def loop(ctx: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Do rounds of each kind in turn; returns the seconds of each pair of rounds, and of parts per step."""
    model = _gpt()
    ctx.state(model=model, optimizer=model.optimizer(lr=3e-3), max_norm=1.0)
    loader = ctx.loader(Sequences(ROUND * (config["rounds"] + 1)), shuffle=False)
    took = time_parts(ctx._steps)
    plain: Plain | None = None
    pairs: list[dict[str, tuple[float, float]]] = []
    done, began = 0, (0.0, 0.0)
    for _ in ctx.epochs(1):
        for rows in loader:
            if done % ROUND == 0:
                plain = plain or Plain()
                pairs.append({"plain": plain.round(rows)})
                began = _now()
            loss = model(rows[:, :-1], rows[:, 1:])[1]
            ctx.backward(loss)
            ctx.step(loss=loss)
            done += 1
            if done % ROUND == 0:
                pairs[-1]["elastic"] = _since(began)
    parts = {part: seconds / done for part, seconds in took.items()}
    return {"pairs": pairs[1:], "parts": parts}


class Plain:
    """The step of ``train_gpt.py``, without what an elastic job adds."""

    def __init__(self) -> None:
        import torch

        model = _gpt()
        self.optimizer = model.optimizer(lr=3e-3)
        self.ddp = torch.nn.parallel.DistributedDataParallel(model)

    def round(self, rows: Any) -> tuple[float, float]:
        """Make the steps of a round; returns seconds and CPU seconds."""
        import torch

        began = _now()
        for _ in range(ROUND):
            self.optimizer.zero_grad()
            loss = self.ddp(rows[:, :-1], rows[:, 1:])[1]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.ddp.parameters(), 1.0)
            self.optimizer.step()
            mean = loss.detach() / torch.distributed.get_world_size()
            torch.distributed.all_reduce(mean)
            float(mean)
        return _since(began)


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _since(began: tuple[float, float]) -> tuple[float, float]:
    clock_s, cpu_s = _now()
    return clock_s - began[0], cpu_s - began[1]


def cost(rounds: int) -> list[Row]:
    """Return the medians of both kinds of steps, and of the ratio of neighbours."""
    with (
        cluster(2),
        running(loop, replicas=(2, 2), batch=BATCH, rounds=rounds) as job,
    ):
        value = checked(job.trainer.result(rounds * WAIT_S)).value
    pairs = value["pairs"]
    rows = []
    for index, unit in enumerate(("clock", "cpu")):
        for name in NAMES:
            values = [one[name][index] / ROUND * 1e3 for one in pairs]
            rows.append(Row(f"gpt_step_{name}_{unit}", statistics.median(values), "ms"))
        ratios = [one["elastic"][index] / one["plain"][index] - 1.0 for one in pairs]
        rows.append(Row(f"gpt_step_cost_{unit}_median", 100 * statistics.median(ratios), "%"))
        quarter = statistics.quantiles(ratios, n=4)
        rows.append(Row(f"gpt_step_cost_{unit}_spread", 100 * (quarter[2] - quarter[0]), "%"))
    plain_s = statistics.median(one["plain"][1] for one in pairs) / ROUND
    for part, seconds in value["parts"].items():
        rows.append(Row(f"gpt_step_parts_{part}", 1e3 * seconds, "ms"))
    rows.append(Row("gpt_step_parts_cost", 100 * sum(value["parts"].values()) / plain_s, "%"))
    return rows
