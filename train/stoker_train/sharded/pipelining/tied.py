"""The sum of the gradients of weights that several stages share, as a tied embedding and head.

Called by the executor at the end of a step, when each holder has the gradient of its own use, reduced over
its data-parallel ranks. Afterwards all holders have the same gradient, bit for bit, and so the same weight
after every step of the optimizer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from stoker.exceptions import BadRequestError
from stoker_train.sharded.pipelining.forms import Form

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from stoker_train.sharded.pipelining.links import Links
    from stoker_train.sharded.pipelining.stage import Stage

_TAG = 1 << 24
"""Above those of micro-batches."""


class TiedWeights:
    """The shared weights of this rank's stages; parts have them in ``tied``: name -> stages."""

    def __init__(self, stages: Sequence[Stage], pipeline: int) -> None:
        self._weights: list[tuple[str, nn.Parameter, tuple[int, ...]]] = []
        """Name, parameter, and the ranks of the pipeline that have it; by name."""
        self.copies: list[nn.Parameter] = []
        """Those that an earlier rank has too: a norm over all ranks counts them there."""
        self._before: list[torch.Tensor | None] = []
        self._is_checked = False
        for stage in stages:
            tied: dict[str, tuple[int, ...]] = getattr(stage.part, "tied", {})
            own = dict(stage.part.named_parameters())
            for name, holders in tied.items():
                ranks = tuple(sorted({holder % pipeline for holder in holders}))
                if len(ranks) < len(holders):
                    raise BadRequestError(
                        f"{name} is in several stages of one rank: {list(holders)}\n"
                        "cut the model into stages that share weights with other ranks alone",
                        field="stages",
                    )
                self._weights.append((name, own[name], ranks))
                if stage.number > min(holders):
                    self.copies.append(own[name])
        self._weights.sort(key=lambda weight: weight[0])

    def begin(self) -> None:
        """Put aside the gradients of steps before, which are sums already."""
        self._before = [parameter.grad for _, parameter, _ in self._weights]
        for _, parameter, _ in self._weights:
            parameter.grad = None

    @torch.no_grad()
    def add_up(self, links: Links) -> None:
        """Sum up each gradient of this step over the ranks that have its weight, in their order."""
        for number, (name, parameter, ranks) in enumerate(self._weights):
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            own = _local(parameter.grad)
            if not self._is_checked:
                self._check(links, name, own, ranks)
            theirs = [
                own if peer == links.rank else _swap(links, own, peer, _TAG + number, name)
                for peer in ranks
            ]
            total = theirs[0].clone()
            for one in theirs[1:]:
                total += one
            links.finish()  # own has left
            before = self._before[number]
            own.copy_(total if before is None else total + _local(before))
        self._is_checked = True

    def _check(self, links: Links, name: str, own: torch.Tensor, ranks: tuple[int, ...]) -> None:
        """Raise for a weight that is cut in another way on another rank."""
        form = Form.of((own.detach(),))
        numbers = torch.tensor(form.encode(), dtype=torch.int64, device=links.device)
        for peer in ranks:
            if peer == links.rank:
                continue
            theirs = Form.decode(_swap(links, numbers, peer, _TAG, name).tolist())
            if theirs.items != form.items:
                raise BadRequestError(
                    f"{name} has another shard on rank {peer} of the pipeline\n"
                    f"here {form}, there {theirs}: cut both stages by the same plan",
                    field="tensor_plan",
                )


def _swap(links: Links, own: torch.Tensor, peer: int, tag: int, name: str) -> torch.Tensor:
    """Exchange tensors of one shape with a peer; the lower of both sends first, as lines may be one way."""
    theirs = torch.empty_like(own, memory_format=torch.contiguous_format)
    what = f"the gradient of {name}"
    if links.rank < peer:
        links.send(own, peer, tag, what)
        return links.wait(links.receive(theirs, peer, tag, what))
    pending = links.receive(theirs, peer, tag, what)
    links.send(own, peer, tag, what)
    return links.wait(pending)


def _local(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
