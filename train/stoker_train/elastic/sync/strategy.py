"""The interface of synchronisation strategies: when replicas exchange, and what.

:mod:`stoker_train.elastic.replica` drives one of them; orders switch it during training. A strategy is made
from plain values in any process, also where torch is missing, so it imports torch where it computes.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

    from stoker_kernels.compression import Compressor
    from stoker_train.elastic.sync.exchange import GradientExchange


class Strategy:
    """A strategy that exchanges gradients in every step: the base of all, and what ``AllReduce`` is.

    All ranks make the same calls with the same values, so that all decide alike. ``compression`` is the name
    of a compressor (:func:`stoker_kernels.make_compressor`), or its options with ``"name"``.
    """

    name: ClassVar[str] = ""
    source: ClassVar[str] = ""
    """Where the formulas come from."""

    def __init__(self, compression: str | Mapping[str, Any] | None = None) -> None:
        if not isinstance(compression, str | Mapping | None):
            raise ValueError(
                f"compression is {compression!r:.80}: it must be a name, or options with a name"
            )
        self.compression = compression if isinstance(compression, str) else dict(compression or {})
        self._compressor: Compressor | None = None
        self._workers = 0
        """The ranks of the last exchange: what the compressor keeps back is in that scale. 0: none."""

    def spec(self) -> dict[str, Any]:
        """Return plain values that :func:`stoker_train.elastic.sync.make_strategy` makes the same from."""
        return {"name": self.name, **self.options()}

    def options(self) -> dict[str, Any]:
        """Return the arguments it was made with."""
        return {"compression": self.compression or None}

    @property
    def compressor(self) -> Compressor | None:
        """The compressor that ``compression`` says, one for the life of the strategy: it remembers."""
        if self.compression and self._compressor is None:
            from stoker_kernels.compression import make_compressor

            if isinstance(self.compression, str):
                self._compressor = make_compressor(self.compression)
            else:
                options = dict(self.compression)
                self._compressor = make_compressor(options.pop("name"), **options)
        return self._compressor

    def gradient_compressor(self) -> Compressor | None:
        """Return the compressor through which gradients go, or None."""
        return self.compressor

    def exchanges_gradients(self, step: int) -> bool:
        """Tell whether step ``step`` sums gradients over the ranks, before it begins."""
        return True

    def communicates(self, step: int) -> bool:
        """Tell whether step ``step`` ends with all ranks in touch: statistics and orders go with these."""
        return self.exchanges_gradients(step)

    def before_optimizer(self, exchange: GradientExchange, params: Sequence[torch.Tensor]) -> None:
        """Bring the gradients into the form that this rank's optimizer takes."""
        exchange.finish()

    def after_optimizer(
        self,
        exchange: GradientExchange,
        params: Sequence[torch.Tensor],
        optimizer: torch.optim.Optimizer,
        step: int,
    ) -> None:
        """Exchange what this step has to, after the optimizer's own step."""

    def observe(self, loss: float, elapsed_s: float) -> None:
        """Take note of what all ranks agreed on: the batch's loss, and rank 0's seconds of training."""

    def settle(
        self,
        exchange: GradientExchange,
        params: Sequence[torch.Tensor],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """Make all replicas equal now: before a commit, a resize, or another strategy. On all ranks."""

    def reset(self, exchange: GradientExchange) -> None:
        """Begin anew, with this exchange, whose replicas are equal. On all ranks, at one step.

        A strategy needs it before its first step, after another strategy, and in each new membership.
        """
        exchange.route(exchange.group, exchange.workers)
        exchange.compress(self.gradient_compressor())
        before, self._workers = self._workers, exchange.workers
        if self._compressor is not None and 0 < before != self._workers:
            from stoker_train.elastic.sync.residuals import rescale

            rescale(self._compressor, self._workers, before)

    def state_dict(self) -> dict[str, Any]:
        """Return what the next steps depend on, apart from the options: the same on all settled ranks."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""

    def rank_state_dict(self) -> dict[str, Any]:
        """Return what is this rank's alone: what its compressor has not sent yet."""
        if self._compressor is None:
            return {}
        return {"compressor": self._compressor.state_dict(), "workers": self._workers}

    def load_rank_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`rank_state_dict` of the same rank; another compressor's is not taken over."""
        own = state.get("compressor")
        if own is not None and self.compressor is not None:
            with contextlib.suppress(ValueError):  # of another method, or other options
                self.compressor.load_state_dict(own)
                self._workers = int(state.get("workers", 0))

    def __repr__(self) -> str:
        options = ", ".join(f"{key}={value!r}" for key, value in self.options().items())
        return f"{type(self).__name__}({options})"

    def copy(self) -> Strategy:
        """Return one of its own with the same options and state."""
        return copy.deepcopy(self)


class AllReduce(Strategy):
    """Synchronous data-parallel SGD: the sum of the weighted gradients, in every step.

    Buckets travel while the backward pass goes on (Li et al., PyTorch Distributed, VLDB 2020).
    """

    name = "all_reduce"
    source = "Li et al., PyTorch Distributed, VLDB 2020"

    def __init__(
        self,
        compression: str | Mapping[str, Any] | None = None,
        bucket_nbytes: int = 25 << 20,
    ) -> None:
        super().__init__(compression)
        self.bucket_nbytes = positive("bucket_nbytes", bucket_nbytes)

    def options(self) -> dict[str, Any]:
        """Return the arguments it was made with."""
        return {**super().options(), "bucket_nbytes": self.bucket_nbytes}


def positive(name: str, value: int) -> int:
    """Return ``value``; ValueError that names the field unless it is a whole number, 1 or more."""
    return whole(name, value, 1)


def whole(name: str, value: Any, least: int) -> int:
    """Return ``value``; ValueError that names the field unless it is a whole number from ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r:.80}: it must be a whole number, {least} or more")
    return int(value)


def seconds(name: str, value: Any) -> float:
    """Return ``value``; ValueError that names the field unless it is a finite time above 0."""
    known = isinstance(value, int | float) and not isinstance(value, bool)
    if not known or not 0.0 < value < math.inf:
        raise ValueError(f"{name} is {value!r:.80}: it must be a time in seconds, and positive")
    return float(value)


def fraction(name: str, value: Any, *, below_one: bool = False) -> float:
    """Return ``value``; ValueError that names the field unless it is from 0 to 1, or ``below_one``."""
    known = isinstance(value, int | float) and not isinstance(value, bool)
    if not known or not 0.0 <= value <= 1.0 or (below_one and value == 1.0):
        end = "from 0, and less than 1" if below_one else "from 0 to 1"
        raise ValueError(f"{name} is {value!r:.80}: it must be {end}")
    return float(value)
