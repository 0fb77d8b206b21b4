"""One part of a model in a pipeline: its forward and backward passes, and what it keeps between them.

Driven by the executor, which gives it what came from the stages beside it. Nothing here sends or receives.
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from stoker.exceptions import BadRequestError
from stoker_train.sharded.parallel.apply import micro_batch as micro_batch_of
from stoker_train.sharded.pipelining.forms import Tensors, outputs_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    LossFn = Callable[[Any, Any], Any]


class Stage:
    """Stage ``number`` of a pipeline: ``part`` of the model; with the loss at its end if it is the last."""

    def __init__(self, part: nn.Module, number: int, micro_batches: int, *, is_last: bool) -> None:
        self.part, self.number, self.is_last = part, number, is_last
        self._micro_batches = micro_batches
        self._loss_fn: LossFn | None = None
        self._kept: dict[int, tuple[Tensors, Tensors]] = {}
        self.losses: list[torch.Tensor] = []
        """Of the micro-batches of this step, in order; empty but on the last stage."""

    def begin(self, loss_fn: LossFn | None) -> None:
        """Begin a step. Raises BadRequestError where nothing makes a loss."""
        self._loss_fn = loss_fn
        if self.is_last and loss_fn is None and not _takes_targets(self.part):
            raise BadRequestError(
                f"loss_fn is missing, as {type(self.part).__name__} takes no targets\n"
                "give loss_fn(output, targets), which returns the mean loss",
                field="loss_fn",
            )

    def forward(self, micro_batch: int, inputs: Any, targets: Any) -> Tensors:
        """Run ``inputs`` forward; returns what the next stage gets, nothing on the last stage.

        ``inputs``: a tensor, or a tuple or dict of the part's arguments. Everything is kept for the backward
        pass, if gradients are on.
        """
        keywords = inputs if isinstance(inputs, dict) else {}
        arguments = () if isinstance(inputs, dict) else inputs
        if not isinstance(arguments, tuple):
            arguments = (arguments,)
        if self.is_last and self._loss_fn is None:
            keywords = {**keywords, "targets": targets}
        found = self.part(*arguments, **keywords)
        outputs = outputs_of(
            self._loss(found, targets) if self.is_last else found,
            self.number,
        )
        if torch.is_grad_enabled():
            tensors = tuple(one for one in arguments if isinstance(one, torch.Tensor))
            self._kept[micro_batch] = tensors, outputs
        if self.is_last:
            return ()
        return outputs

    def backward(self, micro_batch: int, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run a micro-batch backward; returns the gradients of those inputs that have one.

        ``gradients`` are of those outputs that have one, in order. The last micro-batch must be run last:
        then the part's gradients are reduced over its data-parallel ranks.
        """
        inputs, outputs = self._kept.pop(micro_batch)
        roots = [one for one in outputs if one is not None and one.requires_grad]
        leaves = [one for one in inputs if one is not None and one.requires_grad]
        if roots:
            is_last = micro_batch == self._micro_batches - 1
            inside = (
                micro_batch_of(self.part, last=is_last)
                if hasattr(self.part, "parallelized")
                else nullcontext()
            )
            with inside:
                if self.is_last:
                    roots[0].backward()  # type: ignore[no-untyped-call]
                else:
                    torch.autograd.backward(roots, gradients)
        return [torch.zeros_like(one) if one.grad is None else one.grad for one in leaves]

    def forget(self) -> None:
        """Drop what is kept of a step."""
        self._kept.clear()
        self.losses.clear()

    def _loss(self, found: Any, targets: Any) -> torch.Tensor:
        """Return a micro-batch's share of the loss, and note the loss."""
        if self._loss_fn is not None:
            loss = self._loss_fn(found, targets)
        else:
            loss = found[-1] if isinstance(found, tuple) else found
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise BadRequestError(
                f"the loss is a {type(loss).__name__}, and not one number\n"
                "return the mean loss of the micro-batch from loss_fn, or from the last part",
                field="loss_fn",
            )
        self.losses.append(loss.detach().float())
        return loss / self._micro_batches


def _takes_targets(part: nn.Module) -> bool:
    parameters = inspect.signature(part.forward).parameters
    return "targets" in parameters or any(
        one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()
    )
