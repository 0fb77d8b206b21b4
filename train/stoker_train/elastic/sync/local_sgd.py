"""Local SGD and its kin: replicas take steps of their own, and become their mean every so often.

Momentum is as in each one's paper: buffers stay local in local SGD (Lin et al.: with ``every=1`` that is
synchronous SGD, by linearity), and are cleared in AdaComm, whose momentum is that of whole rounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from stoker_train.elastic.sync.strategy import Strategy, fraction, positive, seconds, whole

if TYPE_CHECKING:
    import torch

    from stoker_kernels.compression import Compressor
    from stoker_train.elastic.sync.exchange import GradientExchange

Momentum = Literal["local", "average", "clear"]
MOMENTA = ("local", "average", "clear")


class LocalSGD(Strategy):
    """Local SGD (Stich, ICLR 2019): ``every`` H steps of its own gradients, then the mean of the replicas.

    ``x = sum_k w_k x_k``, where w_k is the part of the H steps' samples that replica k had. ``momentum``
    says what becomes of the optimizer's state at a mean: ``"local"`` keeps each replica's (Lin et al., ICLR
    2020), ``"average"`` takes the mean of it too (Yu et al., ICML 2019), ``"clear"`` sets it to 0. With
    ``block_momentum`` beta the mean change of a round is one step with momentum (Chen & Huo, ICASSP 2016):
    ``u = beta * u + (mean(x_k) - x)``, ``x = x + u``. ``compression`` is that of the changes.
    """

    name = "local_sgd"
    source = "Stich, ICLR 2019; Lin et al., ICLR 2020"

    def __init__(
        self,
        every: int,
        *,
        momentum: Momentum = "local",
        block_momentum: float = 0.0,
        compression: str | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(compression)
        self.every = positive("every", every)
        if momentum not in MOMENTA:
            raise ValueError(f"momentum is {momentum!r}: it must be one of {', '.join(MOMENTA)}")
        self.momentum: Momentum = momentum
        self.block_momentum = fraction("block_momentum", block_momentum, below_one=True)
        self.since = 0
        """Steps since the replicas were equal."""
        self.samples = 0.0
        """This rank's part of their samples, added up."""
        self._start: list[torch.Tensor] = []
        self._velocity: list[torch.Tensor] = []

    def options(self) -> dict[str, Any]:
        """Return the arguments it was made with."""
        return {
            "every": self.every,
            "momentum": self.momentum,
            "block_momentum": self.block_momentum,
            **super().options(),
        }

    @property
    def interval(self) -> int:
        """The steps from one mean to the next, now."""
        return self.every

    def gradient_compressor(self) -> Compressor | None:
        """Return None: ``compression`` is that of changes."""
        return None

    def exchanges_gradients(self, step: int) -> bool:
        """Tell that gradients stay local."""
        return False

    def communicates(self, step: int) -> bool:
        """Tell whether the step ends in a mean."""
        return self.since + 1 >= self.interval

    def before_optimizer(self, exchange: GradientExchange, params: Sequence[torch.Tensor]) -> None:
        """Take the mean over this rank's own samples for gradient."""
        self._remember(params)
        exchange.keep_local()

    def after_optimizer(
        self,
        exchange: GradientExchange,
        params: Sequence[torch.Tensor],
        optimizer: torch.optim.Optimizer,
        step: int,
    ) -> None:
        """Take the mean of all replicas, at the end of a round."""
        self.since += 1
        self.samples += exchange.share
        if self.since >= self.interval:
            self._mean(exchange, params, optimizer)

    def settle(
        self,
        exchange: GradientExchange,
        params: Sequence[torch.Tensor],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """Take the mean now, of the optimizers' state too: only one replica's is kept or passed on."""
        from stoker_train.elastic.sync.averaging import average_state_

        if self.since:
            self._mean(exchange, params, optimizer)
        if self.momentum == "local":
            average_state_(exchange, params, optimizer, 1.0 / exchange.workers)

    def reset(self, exchange: GradientExchange) -> None:
        """Begin a round with the replicas that there are now."""
        super().reset(exchange)
        self.since, self.samples, self._start = 0, 0.0, []

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the round, and the momentum of rounds."""
        return {
            "since": self.since,
            "samples": self.samples,
            "start": [one.clone() for one in self._start],
            "velocity": [one.clone() for one in self._velocity],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self.since, self.samples = int(state["since"]), float(state["samples"])
        self._start = [one.clone() for one in state["start"]]
        self._velocity = [one.clone() for one in state["velocity"]]

    @property
    def _needs_start(self) -> bool:
        return bool(self.compression) or self.block_momentum > 0.0

    def _remember(self, params: Sequence[torch.Tensor]) -> None:
        """Keep the parameters at the start of a round, where its change is what counts."""
        if self.since == 0 and self._needs_start:
            self._start = [param.detach().clone() for param in params]

    def _mean(
        self,
        exchange: GradientExchange,
        params: Sequence[torch.Tensor],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        from stoker_train.elastic.sync import averaging

        weight = self.samples / self.since
        if self._needs_start:
            self._add_changes(exchange, params, weight)
        else:
            averaging.average_(exchange, params, weight)
        if self.momentum == "average":
            averaging.average_state_(exchange, params, optimizer, weight)
        elif self.momentum == "clear":
            _clear(optimizer, params)
        self.since, self.samples = 0, 0.0

    def _add_changes(
        self, exchange: GradientExchange, params: Sequence[torch.Tensor], weight: float
    ) -> None:
        import torch

        from stoker_train.elastic.sync.averaging import mean_of_changes

        values = [param.detach() for param in params]
        changes = list(torch._foreach_sub(values, self._start))
        means = mean_of_changes(exchange, changes, weight, self.compressor)
        if self.block_momentum:
            if not self._velocity:
                self._velocity = [torch.zeros_like(value) for value in values]
            torch._foreach_mul_(self._velocity, self.block_momentum)
            torch._foreach_add_(self._velocity, means)
            means = self._velocity
        torch._foreach_copy_(values, list(torch._foreach_add(self._start, means)))


class PostLocalSGD(LocalSGD):
    """Post-local SGD (Lin et al., ICLR 2020): gradients are summed until step ``after``, then local SGD.

    Its large steps at first find a good region; local noise afterwards finds one that generalises.
    """

    name = "post_local_sgd"
    source = "Lin et al., Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020"

    def __init__(self, every: int, after: int, **options: Any) -> None:
        super().__init__(every, **options)
        self.after = whole("after", after, 0)
        self._synchronous = True

    def options(self) -> dict[str, Any]:
        """Return the arguments it was made with."""
        return {**super().options(), "after": self.after}

    def exchanges_gradients(self, step: int) -> bool:
        """Tell whether step ``step`` is before ``after``."""
        self._synchronous = step < self.after
        return self._synchronous

    def communicates(self, step: int) -> bool:
        """Tell whether the step sums gradients, or ends in a mean."""
        return step < self.after or super().communicates(step)

    def before_optimizer(self, exchange: GradientExchange, params: Sequence[torch.Tensor]) -> None:
        """Sum the gradients, or take this rank's own."""
        if self._synchronous:
            exchange.finish()
        else:
            super().before_optimizer(exchange, params)

    def after_optimizer(
        self,
        exchange: GradientExchange,
        params: Sequence[torch.Tensor],
        optimizer: torch.optim.Optimizer,
        step: int,
    ) -> None:
        """Take the mean of all replicas, at the end of a round."""
        if not self._synchronous:
            super().after_optimizer(exchange, params, optimizer, step)


class AdaComm(LocalSGD):
    """AdaComm (Wang & Joshi, MLSys 2019): rounds of tau steps, which become shorter as the loss falls.

    Every ``every_s`` seconds ``tau = ceil(sqrt(F / F_0) * tau0)``, with F the loss now and F_0 the first;
    where that is not below the tau before, ``tau = ceil(shrink * tau)``: it never grows, and does not stay
    for ever where the loss stalls. The optimizer's buffers are cleared at each mean, and rounds have a
    momentum.
    """

    name = "adacomm"
    source = "Wang & Joshi, Adaptive Communication Strategies, MLSys 2019"

    def __init__(
        self,
        tau0: int,
        every_s: float,
        *,
        shrink: float = 0.5,
        momentum: Momentum = "clear",
        block_momentum: float = 0.3,
        compression: str | Mapping[str, Any] | None = None,
    ) -> None:
        positive("tau0", tau0)
        super().__init__(
            tau0, momentum=momentum, block_momentum=block_momentum, compression=compression
        )
        seconds("every_s", every_s)
        self.tau0, self.every_s = tau0, every_s
        self.shrink = fraction("shrink", shrink)
        self.tau = tau0
        self.first_loss: float | None = None
        self._next_s: float | None = None
        self._losses: list[float] = []

    def options(self) -> dict[str, Any]:
        """Return the arguments it was made with."""
        options = {**super().options(), "tau0": self.tau0, "every_s": self.every_s}
        options["shrink"] = self.shrink
        del options["every"]
        return options

    @property
    def interval(self) -> int:
        """tau, now."""
        return self.tau

    def observe(self, loss: float, elapsed_s: float) -> None:
        """Choose tau at the end of each ``every_s``, by the mean loss of what was observed in it."""
        if not math.isfinite(loss):
            return
        if self.first_loss is None or self._next_s is None:
            self.first_loss, self._next_s = loss, elapsed_s + self.every_s
            return
        self._losses.append(loss)
        if self._next_s - elapsed_s > self.every_s:  # by the clock of a rank 0 that is gone
            self._next_s = elapsed_s + self.every_s
        if elapsed_s < self._next_s:
            return
        mean = sum(self._losses) / len(self._losses)
        self._losses = []
        passed = math.floor((elapsed_s - self._next_s) / self.every_s) + 1
        self._next_s += passed * self.every_s
        ratio = max(mean, 0.0) / self.first_loss if self.first_loss > 0 else 0.0
        tau = max(1, math.ceil(math.sqrt(ratio) * self.tau0))
        self.tau = tau if tau < self.tau else max(1, math.ceil(self.shrink * self.tau))

    def state_dict(self) -> dict[str, Any]:
        """Return tau, what it depends on, and the round's state."""
        own = {"tau": self.tau, "first_loss": self.first_loss, "next_s": self._next_s}
        return {**super().state_dict(), **own, "losses": list(self._losses)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        super().load_state_dict(state)
        self.tau, self.first_loss = int(state["tau"]), state["first_loss"]
        self._next_s, self._losses = state["next_s"], list(state["losses"])


def _clear(optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor]) -> None:
    """Set the optimizer's buffers to 0; counters of steps, of a single value, go on."""
    import torch

    for param in params:
        for value in optimizer.state.get(param, {}).values():
            if isinstance(value, torch.Tensor) and value.shape == param.shape:
                value.zero_()
