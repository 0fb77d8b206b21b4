"""The losses of others: cross-entropy, and for language models one that never holds all logits.

A causal model of transformers computes ``head(hidden)`` and then ``self.loss_function(logits, labels)``. In
training a hook before its forward leaves the labels with the head, which computes the loss at once and
returns :data:`NO_LOGITS`; the loss function then hands over what the head has computed. BERT and T5 make
their loss within the forward: there hooks take the labels out of the call, and put the loss into its result.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn import functional as F

from stoker_kernels.ops.cross_entropy import cross_entropy
from stoker_kernels.ops.linear_cross_entropy import linear_cross_entropy
from stoker_kernels.patching.masks import REMEDY
from stoker_kernels.patching.norms import same_dtype
from stoker_kernels.patching.recognition import plain


class LogitsNotMadeError(AttributeError):
    """Logits were asked for after a training step that never made them."""


class _NoLogits:
    """A stand-in for the logits in a training step's output: any use of it raises."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise LogitsNotMadeError(
            "a training step with labels makes no logits: its loss is computed a few tokens at a time\n"
            'use apply(model, skip={"linear_cross_entropy"}), or model.eval()'
        )

    __getitem__ = __len__ = __iter__ = __array__ = __add__ = __mul__ = __matmul__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse()

    def __repr__(self) -> str:
        return "NO_LOGITS"

    def __reduce__(self) -> str:
        return "NO_LOGITS"


NO_LOGITS = _NoLogits()


@dataclass(slots=True)
class Labels:
    """The slots by which hook, head and loss of one model talk to each other within one forward."""

    places: dict[
        str, int
    ]  # of ``labels`` and ``attention_mask`` among forward's positional arguments
    defers: bool  # whether the head computes the loss
    shifts: bool = True  # whether a token's label is the next token
    why: str = ""  # why the head does not, where it was wanted to
    labels: torch.Tensor | None = None
    shifted: torch.Tensor | None = None
    count: Any = None
    ignore_index: int = -100
    loss: torch.Tensor | None = None
    inner: torch.Tensor | None = None  # labels that the model itself is not given


_READ = ("labels", "attention_mask", "decoder_input_ids", "decoder_inputs_embeds")


def places(kind: type[nn.Module]) -> dict[str, int]:
    """Return where the arguments of ``kind.forward`` that we read stand, without self."""
    names = list(inspect.signature(kind.forward).parameters)
    return {name: names.index(name) - 1 for name in _READ if name in names}


def _given(state: Labels, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    place = state.places[name]
    return args[place] if len(args) > place else kwargs.get(name)


def _mean(total: Any, count: Any) -> torch.Tensor:
    """Divide the sum of losses by the number of tokens that the caller counted."""
    loss: torch.Tensor = total / (
        count.to(total.device) if isinstance(count, torch.Tensor) else count
    )
    return loss


def shift(labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Map labels (B, S) -> the next token's label at each token, ``ignore_index`` at the last."""
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()


class CausalLoss:
    """``ForCausalLMLoss`` of transformers, as a model's ``loss_function``."""

    def __init__(self, state: Labels) -> None:
        self.state = state

    def __call__(
        self,
        logits: Any,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Map logits (B, S, V), labels (B, S) -> the mean loss in nats, fp32, () ."""
        if logits is NO_LOGITS:
            loss, self.state.loss = self.state.loss, None
            assert loss is not None
            return loss
        if shift_labels is None:
            shift_labels = shift(labels, ignore_index)
        rows, targets = logits.view(-1, vocab_size), shift_labels.view(-1).to(logits.device)
        if num_items_in_batch is None:
            return cross_entropy(rows, targets, ignore_index=ignore_index)
        total = cross_entropy(rows, targets, ignore_index=ignore_index, reduction="sum")
        return _mean(total, num_items_in_batch)


class HeadForward:
    """The linear layer onto the vocabulary: logits, or the loss where labels wait for it."""

    def forward(self: Any, input: torch.Tensor) -> Any:
        """Map x (B, S, C) -> logits (B, S, V), or NO_LOGITS."""
        state: Labels = self._stoker_labels
        labels = state.labels
        if labels is None:
            return super().forward(input)  # type: ignore[misc]
        targets = labels if state.shifted is None else state.shifted
        if state.shifts and state.shifted is None:
            targets = shift(labels, state.ignore_index)
        state.labels = state.shifted = None
        if targets.shape != input.shape[:-1]:  # logits of some positions alone
            return super().forward(input)  # type: ignore[misc]
        counted, state.count = state.count, None
        state.loss = linear_cross_entropy(
            input, self.weight, targets.to(input.device), bias=self.bias, ignore_index=state.ignore_index,
            reduction="mean" if counted is None else "sum",
        )  # fmt: skip
        if not state.shifts and same_dtype(
            input, input
        ):  # as torch's, of logits in the head's dtype
            state.loss = state.loss.to(input.dtype)
        if counted is not None:
            state.loss = _mean(state.loss, counted)
        return NO_LOGITS


def before_causal(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Leave the labels of a training step with the head: a forward pre-hook of the model."""
    loss = module.__dict__.get("_loss_function")
    if type(loss) is not CausalLoss:
        return
    state = loss.state
    given = _given(state, "labels", args, kwargs)
    mask = _given(state, "attention_mask", args, kwargs)
    ignore_index = kwargs.get("ignore_index", -100)
    if given is not None and _is_ours(module):
        shifted = kwargs.get("shift_labels")
        refuse_padded_labels(
            shift(given, ignore_index) if shifted is None else shifted, mask, ignore_index
        )
    defers = given is not None and state.defers and module.training and torch.is_grad_enabled()
    if getattr(module, "_is_replica", False):  # DataParallel's threads share the state
        return
    state.labels = None
    if not defers or not _deferrable(module, state):
        return
    state.labels, state.shifted = given, kwargs.get("shift_labels")
    state.count, state.ignore_index = kwargs.get("num_items_in_batch"), ignore_index


def before_inner(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Take the labels out of a call whose loss is made within the forward: a forward pre-hook.

    :func:`after_inner` puts the loss of them into the output. Labels given by position stay the model's.
    """
    state: Labels = module._stoker_labels
    state.labels = state.inner = None
    labels = kwargs.get("labels")
    if labels is None or getattr(module, "_is_replica", False):
        return None
    state.inner = labels
    if state.defers and module.training and torch.is_grad_enabled() and _deferrable(module, state):
        state.labels = labels
    changed = {**kwargs, "labels": None}
    decoded = [_given(state, name, args, kwargs) for name in _READ[2:] if name in state.places]
    if decoded and all(value is None for value in decoded):  # T5 makes them of the labels
        changed["decoder_input_ids"] = module._shift_right(labels)
    return args, changed


def after_inner(module: Any, args: tuple[Any, ...], output: Any) -> Any:
    """Put the loss of :func:`before_inner`'s labels into the output: a forward hook."""
    state: Labels = module._stoker_labels
    labels, state.inner = state.inner, None
    if labels is None:
        return None
    logits = output[0]
    if logits is NO_LOGITS:
        loss, state.loss = state.loss, None
    else:
        targets = labels.to(logits.device).view(-1)
        loss = cross_entropy(logits.view(-1, logits.shape[-1]), targets)
        if same_dtype(logits, logits):
            loss = loss.to(logits.dtype)
    if isinstance(output, tuple):
        return (loss, *output)
    return type(output)(**{**output, "loss": loss})


def _is_ours(module: Any) -> bool:
    return bool(module.config._attn_implementation == "stoker")


def _deferrable(module: Any, state: Labels) -> bool:
    """Return whether the head still is what apply left there: no adapter, no hook, the whole vocabulary."""
    head = module.get_output_embeddings()
    if getattr(head, "_stoker_labels", None) is not state:
        return False
    return bool(plain(head, type(head)) and head.out_features == module.config.vocab_size)


def refuse_padded_labels(targets: torch.Tensor, mask: Any, ignore_index: int) -> None:
    """Raise if a token behind a row's last real one has a target: what attention makes of it is not defined.

    targets (B, S): the label that each token predicts. Before the first real token attention gives zero, as
    torch's ``scaled_dot_product_attention`` does.
    """
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or mask.shape != targets.shape:
        return
    real = mask.bool()
    behind = ~real & (real.cumsum(1) > 0)
    bad = (behind & (targets != ignore_index).to(mask.device)).any()
    message = (
        f"labels: tokens of padding have labels that count\nset them to {ignore_index}, or "
        + REMEDY.removeprefix("use ")
    )
    if torch.compiler.is_compiling():
        torch._assert_async(~bad, message)
    elif bad:
        raise ValueError(message)


class CrossEntropyForward:
    """``torch.nn.CrossEntropyLoss`` over rows of logits and class numbers."""

    def forward(self: Any, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Map logits (N, C), classes (N,) -> the loss, in the logits' dtype."""
        rows = input.ndim == 2 and target.ndim == 1 and target.dtype == torch.int64
        if not rows or not same_dtype(input, input):
            return super().forward(input, target)  # type: ignore[misc]
        return cross_entropy(
            input, target, ignore_index=self.ignore_index, label_smoothing=self.label_smoothing,
            reduction=self.reduction,
        ).to(input.dtype)  # fmt: skip

    @staticmethod
    def why_not(module: Any) -> str:
        """Return why it stays, or ""."""
        return "" if module.weight is None else "its classes have weights"
