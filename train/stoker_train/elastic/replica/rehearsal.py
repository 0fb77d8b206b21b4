"""A rehearsal: one batch of the loop by a newcomer alone, while the others train.

It imports, builds and compiles what the first step needs; then everything is thrown away. The replica's actor
calls it before the loop proper. It reports nothing, and touches no group, ledger or file.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from stoker.exceptions import ConflictError
from stoker_train.elastic.data.cursor import Cursor
from stoker_train.elastic.data.loader import ElasticLoader, MicroBatch, StepPlan
from stoker_train.elastic.replica.current import set_current
from stoker_train.elastic.state.train_state import TrainState

if TYPE_CHECKING:
    import torch

__all__ = ("call", "invoke", "rehearse")


class _Rehearsed(BaseException):
    """Raised when the loop has done its first step; no loop should catch it."""


class _Stage:
    """The context of a loop that rehearses: rank 1 of 2, so that it writes and reports nothing."""

    rank, world_size, generation, epoch, step_number, stopped = 1, 2, 0, 0, 0, False

    def __init__(self, real: Any) -> None:
        self._real = real
        self.device = real.device
        self.batch = real.batch
        self.metrics = real.metrics
        self._loader: ElasticLoader | None = None
        self._optimizer: torch.optim.Optimizer | None = None

    def state(self, *, optimizer: Any = None, max_norm: Any = None, **objects: Any) -> TrainState:
        self._optimizer = optimizer
        return TrainState(optimizer=optimizer, **objects)

    def loader(self, dataset: Any, *, seed: int | None = None, **options: Any) -> ElasticLoader:
        self._loader = ElasticLoader(
            dataset, Cursor(), self._plan, device=self.device, seed=seed or 0, **options
        )
        return self._loader

    def _plan(self) -> StepPlan:
        assert self._loader is not None
        settings = self._real._settings
        size = max(1, min(settings.local, settings.batch // 2, self._loader.samples))
        return StepPlan(size, 0, size, settings.local)

    def epochs(self, count: int) -> Iterator[int]:
        yield from range(count)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, loss: Any = None, max_norm: Any = None) -> bool:
        assert self._loader is not None
        micro: MicroBatch = self._loader.micro
        if micro.is_last and self._optimizer is not None:
            self._optimizer.step()
            raise _Rehearsed
        return False

    def mean(self, value: Any, weight: float = 1.0) -> float:
        return float(value)

    def report(self, **values: Any) -> None:
        pass

    def join(self) -> None:
        pass

    def record_samples(self, *entry: Any) -> None:
        pass

    def commit(self) -> bool:
        raise _Rehearsed

    check_orders = commit

    def recover(self, error: BaseException) -> None:
        raise error


def rehearse(loop: Any, config: Any, context: Any) -> None:
    """Run ``loop`` up to the end of its first step; raises what it raises before that."""
    stage = _Stage(context)
    set_current(stage)
    try:
        call(loop, stage, config)
    except _Rehearsed:
        pass
    finally:
        set_current(None)
        if stage._loader is not None:
            stage._loader.close()


def invoke(loop: Any, context: Any, config: Any) -> Any:
    """Call ``loop(ctx, config)``, or ``loop(ctx)`` where it takes no more."""
    try:
        count = len(
            [
                one
                for one in inspect.signature(loop).parameters.values()
                if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
            ]
        )
    except (TypeError, ValueError):
        count = 1 if config is None else 2
    return loop(context, config) if count >= 2 else loop(context)


def call(loop: Any, context: Any, config: Any) -> Any:
    """Call the loop as :func:`invoke` does.

    ConflictError in place of what torch raises in a collective that the loop did by itself.
    """
    try:
        return invoke(loop, context, config)
    except (RuntimeError, ValueError) as error:  # torch's errors of groups are such
        if not _is_own_collective(error):
            raise
        text = str(error).partition("\n")[0]
        raise ConflictError(
            "a collective of the loop outside of ctx has failed\n"
            "use ctx.mean() and ctx.backward(), or stoker.train.elastic.run: only these go on when ranks "
            f"come and go ({text:.200})"
        ) from error


def _is_own_collective(error: BaseException) -> bool:
    """Return whether torch raised it in a collective that was called by none of this project."""
    inside = False
    own = tuple(_folders("stoker", "stoker_train", "stoker_kernels"))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = frame.filename.replace(os.sep, "/")
        if "/torch/" not in path:
            return inside and not path.startswith(own)
        inside = inside or "/torch/distributed/" in path
    return False


def _folders(*packages: str) -> Iterator[str]:
    """Yield the folders of packages, those that are installed, each with a slash at its end."""
    for package in packages:
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            yield folder.replace(os.sep, "/") + "/"
