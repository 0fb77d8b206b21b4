"""Plans, why others were refused, and how both are shown."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from stoker_train.planning.memory import Memory
from stoker_train.planning.strategy import Strategy

_GB = 1e9
_COLUMNS = (
    "plan",
    "step",
    "tokens/s",
    "of rate",
    "GB a rank",
    "compute",
    "bubble",
    "exchange",
    "update",
)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step, by what they are spent on; exchange is what no computation hides."""

    compute_s: float
    bubble_s: float
    tensor_s: float
    pipeline_s: float
    expert_s: float
    data_s: float
    update_s: float

    @property
    def total_s(self) -> float:
        """The whole step."""
        return self.compute_s + self.bubble_s + self.exchange_s + self.update_s

    @property
    def exchange_s(self) -> float:
        """All exchange between ranks."""
        return self.tensor_s + self.pipeline_s + self.expert_s + self.data_s


@dataclass(frozen=True, slots=True)
class Plan:
    """A way to train, with what it takes.

    ``stages``: the layers [first, end) of each stage, in order; a rank of an interleaved pipeline has every
    ``pipeline``-th. ``memory``: of the rank that needs most. ``efficiency``: the model's operations (without
    what is computed again) over those that the GPUs' rate allows in the time.
    """

    strategy: Strategy
    stages: tuple[tuple[int, int], ...]
    memory: Memory
    time: StepTime
    tokens_per_s: float
    efficiency: float

    def rank_of(self, data: int, tensor: int, stage: int) -> int:
        """Return the rank at a place; ranks fill one node after the other."""
        degrees = self.strategy
        return tensor + data * degrees.data_stride + stage * degrees.pipeline_stride

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain types, for JSON."""
        degrees = asdict(self.strategy) | {"recompute": str(self.strategy.recompute)}
        return {
            "strategy": degrees,
            "stages": [list(stage) for stage in self.stages],
            "memory_bytes": asdict(self.memory) | {"total": self.memory.total},
            "step_s": asdict(self.time) | {"total_s": self.time.total_s},
            "tokens_per_s": self.tokens_per_s,
            "efficiency": self.efficiency,
        }


@dataclass(frozen=True, slots=True)
class Refusal:
    """A reason why plans were not taken: a constraint, how many it bound, and the nearest of them."""

    constraint: str
    count: int
    nearest: str

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain types, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Plans:
    """The best plans, fastest first, and what bound the others."""

    plans: tuple[Plan, ...]
    refusals: tuple[Refusal, ...]
    considered: int

    @property
    def best(self) -> Plan:
        """The fastest plan; ValueError with what binds where there is none."""
        if not self.plans:
            raise ValueError("no plan fits\n" + "\n".join(self._bindings()))
        return self.plans[0]

    def as_dict(self) -> dict[str, Any]:
        """Return them as plain types, for JSON."""
        return {
            "plans": [plan.as_dict() for plan in self.plans],
            "refusals": [refusal.as_dict() for refusal in self.refusals],
            "considered": self.considered,
        }

    def rows(self) -> list[dict[str, str]]:
        """Return a row for each plan, by the columns of a table."""
        found = []
        for plan in self.plans:
            time = plan.time
            cells = (
                str(plan.strategy),
                _seconds(time.total_s),
                f"{plan.tokens_per_s:,.0f}",
                f"{plan.efficiency:.0%}",
                f"{plan.memory.total / _GB:.1f}",
                *map(_seconds, (time.compute_s, time.bubble_s, time.exchange_s, time.update_s)),
            )
            found.append(dict(zip(_COLUMNS, cells, strict=True)))
        return found

    def _bindings(self) -> list[str]:
        return [f"{one.constraint} ({one.count}): {one.nearest}" for one in self.refusals]

    def __str__(self) -> str:
        rows = [dict(zip(_COLUMNS, _COLUMNS, strict=True)), *self.rows()]
        widths = {name: max(len(row[name]) for row in rows) for name in _COLUMNS}
        lines = [
            "  ".join(row[name].ljust(widths[name]) for name in _COLUMNS).rstrip() for row in rows
        ]
        if not self.plans:
            lines = ["no plan fits"]
        return "\n".join([*lines, f"{self.considered} considered; not taken:", *self._bindings()])


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 0.1 else f"{value * 1e3:.3g} ms"
