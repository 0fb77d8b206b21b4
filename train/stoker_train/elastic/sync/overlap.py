"""Overlap-local-SGD: the mean of one round travels while the next is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stoker_train.elastic.sync.strategy import Strategy, fraction, positive

if TYPE_CHECKING:
    import torch

    from stoker_kernels.compression import Compressor
    from stoker_train.elastic.sync.averaging import PendingMean
    from stoker_train.elastic.sync.exchange import GradientExchange


class OverlapLocalSGD(Strategy):
    """Overlap-local-SGD (Wang, Liang & Joshi, ICASSP 2020): an anchor z draws replicas every tau steps.

    At the end of a round ``x_k = x_k - alpha * (x_k - z)``; the mean of these x_k is launched, and is there
    at the end of the next round, where it moves the anchor: ``v = beta * v + (mean - z)``, ``z = z + v``
    (``beta`` is ``anchor_momentum``). So a round takes the longer of computing and exchanging, not their
    sum. The optimizers' buffers stay local. The paper's choice: alpha 0.6, beta 0.7.
    """

    name = "overlap_local_sgd"
    source = "Wang, Liang & Joshi, Overlap Local-SGD, ICASSP 2020"

    def __init__(self, tau: int, alpha: float = 0.6, *, anchor_momentum: float = 0.0) -> None:
        super().__init__()
        self.tau = positive("tau", tau)
        self.alpha = fraction("alpha", alpha)
        self.anchor_momentum = fraction("anchor_momentum", anchor_momentum, below_one=True)
        self.since = 0
        self.samples = 0.0
        self._anchor: list[torch.Tensor] = []
        self._velocity: list[torch.Tensor] = []
        self._pending: PendingMean | None = None

    def options(self) -> dict[str, Any]:
        """Return the arguments it was made with."""
        return {"tau": self.tau, "alpha": self.alpha, "anchor_momentum": self.anchor_momentum}

    def gradient_compressor(self) -> Compressor | None:
        """Return None: gradients do not travel."""
        return None

    def exchanges_gradients(self, step: int) -> bool:
        """Tell that gradients stay local."""
        return False

    def communicates(self, step: int) -> bool:
        """Tell whether the step ends a round."""
        return self.since + 1 >= self.tau

    def before_optimizer(self, exchange: GradientExchange, params: Sequence[torch.Tensor]) -> None:
        """Take the mean over this rank's own samples for gradient."""
        if not self._anchor:
            self._anchor = [param.detach().clone() for param in params]
        exchange.keep_local()

    def after_optimizer(
        self,
        exchange: GradientExchange,
        params: Sequence[torch.Tensor],
        optimizer: torch.optim.Optimizer,
        step: int,
    ) -> None:
        """Move the anchor, draw this replica to it, and launch the next mean, at the end of a round."""
        from stoker_train.elastic.sync.averaging import start_mean

        self.since += 1
        self.samples += exchange.share
        if self.since < self.tau:
            return
        self._receive()
        self._pull(params, self.alpha)
        weight = self.samples / self.since
        self._pending = start_mean(exchange, params, weight)
        self.since, self.samples = 0, 0.0

    def settle(
        self,
        exchange: GradientExchange,
        params: Sequence[torch.Tensor],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """Take the mean of all replicas now; it is the anchor too."""
        from stoker_train.elastic.sync.averaging import average_, average_state_

        self._receive()
        weight = self.samples / self.since if self.since else 1.0 / exchange.workers
        average_(exchange, params, weight)
        average_state_(exchange, params, optimizer, 1.0 / exchange.workers)
        self.since, self.samples, self._anchor, self._velocity = 0, 0.0, [], []

    def reset(self, exchange: GradientExchange) -> None:
        """Forget the anchor, and what is on its way in the old group: replicas are equal now."""
        super().reset(exchange)
        self.since, self.samples, self._pending = 0, 0.0, None
        self._anchor, self._velocity = [], []

    def state_dict(self) -> dict[str, Any]:
        """Return anchor and place in the round; waits for the mean that is on its way."""
        self._receive()
        return {
            "since": self.since,
            "samples": self.samples,
            "anchor": [one.clone() for one in self._anchor],
            "velocity": [one.clone() for one in self._velocity],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self.since, self.samples, self._pending = int(state["since"]), float(state["samples"]), None
        self._anchor = [one.clone() for one in state["anchor"]]
        self._velocity = [one.clone() for one in state["velocity"]]

    def _receive(self) -> None:
        """Wait for the mean that is on its way, if any, and move the anchor."""
        import torch

        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        changes = list(torch._foreach_sub(pending.wait(), self._anchor))
        if not self._velocity:
            self._velocity = [torch.zeros_like(anchor) for anchor in self._anchor]
        torch._foreach_mul_(self._velocity, self.anchor_momentum)
        torch._foreach_add_(self._velocity, changes)
        torch._foreach_add_(self._anchor, self._velocity)

    def _pull(self, params: Sequence[torch.Tensor], alpha: float) -> None:
        import torch

        torch._foreach_lerp_([param.detach() for param in params], self._anchor, alpha)
