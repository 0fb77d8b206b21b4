"""A step of training, or an evaluation, through a pipeline of ranks.

Each rank makes one :class:`Pipeline` of its parts and calls it with the same batch as the other ranks of its
pipeline: the first stage reads the inputs, the last one the targets, and all know by the shapes whether the
messages between stages have new ones. Used by the context of a rank; it needs ``torch.distributed`` alone.

Dropout: each part draws from the random state of its own process. The masks are as random as those of one
process, and others than these; ranks of one tensor-parallel group must have the same state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from stoker.exceptions import BadRequestError
from stoker_train.sharded.parallel.apply import release
from stoker_train.sharded.parallel.mesh import DATA, PIPELINE
from stoker_train.sharded.pipelining.forms import NUMBERS, Form, Tensors
from stoker_train.sharded.pipelining.links import Links, Pending, Sent
from stoker_train.sharded.pipelining.schedules import (
    Action,
    Kind,
    Pass,
    forward_only,
    kind_of,
    schedule,
)
from stoker_train.sharded.pipelining.stage import Stage
from stoker_train.sharded.pipelining.tied import TiedWeights
from stoker_train.sharded.pipelining.timeline import Transfer, simulate, steps

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from stoker_train.planning.strategy import Strategy
    from stoker_train.sharded.pipelining.stage import LossFn
    from stoker_train.sharded.pipelining.timeline import Step

_FORM_TAG = 1 << 22
"""Above those of micro-batches."""


class Pipeline:
    """The parts of this rank in a pipeline, and how micro-batches run through it.

    ``parts``: of stages rank, rank + pipeline, ... as ``split`` returns them, also after ``parallelize``.
    ``mesh``: that of ``device_mesh``. ``loss_fn(output, targets)`` returns the mean loss of a micro-batch,
    where ``output`` is what the last part returns; None calls the last part with ``targets=``, whose loss is
    what it returns, or the last of it (our models). ``kind`` of schedule: 1F1B, interleaved if the strategy
    interleaves. Every wait for another rank ends after ``timeout_s``.
    """

    def __init__(
        self,
        parts: nn.Module | Sequence[nn.Module],
        strategy: Strategy,
        mesh: DeviceMesh,
        loss_fn: LossFn | None = None,
        *,
        kind: Kind | str | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        pipeline, interleave = strategy.pipeline, strategy.interleave
        self._micro_batches = strategy.micro_batches
        self._loss_fn = loss_fn
        self._kind = kind or kind_of(interleave)
        group = mesh.get_group(PIPELINE)
        self._data = mesh.get_group(DATA) if strategy.data > 1 else None
        found = [parts] if isinstance(parts, torch.nn.Module) else list(parts)
        if group.size() != pipeline or len(found) != interleave:
            raise BadRequestError(
                f"{len(found)} parts on each of {group.size()} ranks are no pipeline {pipeline} with "
                f"interleave {interleave}\nsplit the model by the plan of this mesh",
                field="parts",
            )
        if pipeline == 1 and interleave > 1:
            raise BadRequestError(
                f"interleave {interleave} needs a pipeline of 2 ranks or more\ntake interleave=1",
                field="interleave",
            )
        self._links = Links(group, torch.device(_device(mesh)), timeout_s)
        self._rank, self._ranks, self._count = self._links.rank, pipeline, pipeline * interleave
        self._stages = {
            number: Stage(part, number, self._micro_batches, is_last=number == self._count - 1)
            for number, part in zip(range(self._rank, self._count, pipeline), found, strict=True)
        }
        self._tied = TiedWeights(tuple(self._stages.values()), pipeline)
        self._orders = {True: self._order(True), False: self._order(False)}
        self._shapes: dict[bool, object] = {}
        """Of the batch, in training (True) and evaluation, for which the forms are known."""
        self._forms: dict[bool, dict[int, Form]] = {True: {}, False: {}}
        """Of what each stage returns, as far as this rank sends or receives it."""
        self._is_broken = False

    @property
    def sent(self) -> Sent:
        """Messages and bytes that this rank has sent to other ranks of its pipeline so far."""
        return self._links.sent

    @property
    def copies(self) -> list[nn.Parameter]:
        """The parameters here that a rank before this one has too: a norm over all ranks leaves them out."""
        return self._tied.copies

    def step(self, inputs: Any, targets: Any = None, loss_fn: LossFn | None = None) -> torch.Tensor:
        """Run a batch forward and backward; returns its mean loss, on every rank.

        ``inputs`` (B, ...): a tensor, or a tuple or dict of arguments of the whole model, cut along the first
        dimension into the strategy's micro-batches of equal size; ``targets`` likewise, for the loss. Every
        rank gives batches of the same shapes. ``loss_fn`` takes the place of the pipeline's. With data
        parallelism each pipeline has a batch of its own, and the loss is the mean of all. Gradients are added
        to those of the parts' parameters; they are of the mean of the micro-batches' losses (each counts the
        same, also where a loss leaves targets out: for the mean over all targets let ``loss_fn`` return their
        sum over the mean number of targets in a micro-batch of the job). Raises BadRequestError for a batch
        that cannot be cut, DeadlineExceededError and UnavailableError where another rank does not come: then
        all ranks of the pipeline must be started again.
        """
        return self._run(inputs, targets, loss_fn, trains=True)

    def evaluate(
        self, inputs: Any, targets: Any = None, loss_fn: LossFn | None = None
    ) -> torch.Tensor:
        """Run a batch forward alone, without dropout and gradients; returns its mean loss, on every rank."""
        modules = [module for stage in self._stages.values() for module in stage.part.modules()]
        training = [module for module in modules if module.training]
        for module in training:
            module.training = False
        try:
            with torch.no_grad():
                return self._run(inputs, targets, loss_fn, trains=False)
        finally:
            for module in training:
                module.training = True
            release([stage.part for stage in self._stages.values()])

    def _order(self, trains: bool) -> list[Step]:
        make = schedule if trains else forward_only
        interleave = self._count // self._ranks
        orders = [
            make(self._kind, self._ranks, self._micro_batches, rank, interleave)
            for rank in range(self._ranks)
        ]
        return steps(simulate(orders), self._rank)

    def _run(
        self, inputs: Any, targets: Any, loss_fn: LossFn | None, *, trains: bool
    ) -> torch.Tensor:
        if self._is_broken:
            raise BadRequestError(
                "an earlier step of this pipeline failed\nstart its ranks again, from a checkpoint"
            )
        shapes = _shapes_of((inputs, targets))
        if self._shapes.get(trains) != shapes:
            self._forms[trains].clear()
        batch = list(
            zip(
                _cut(inputs, self._micro_batches, "inputs"),
                _cut(targets, self._micro_batches, "targets"),
                strict=True,
            )
        )
        for stage in self._stages.values():
            stage.begin(loss_fn or self._loss_fn)
        self._is_broken = True
        if trains:
            self._tied.begin()
        _Run(self._stages, self._links, self._forms[trains], batch, self._count).do(
            self._orders[trains]
        )
        if trains:
            self._tied.add_up(self._links)
        loss = self._loss()
        self._links.finish()
        for stage in self._stages.values():
            stage.forget()
        self._shapes[trains], self._is_broken = shapes, False
        return loss

    def _loss(self) -> torch.Tensor:
        last = self._stages.get(self._count - 1)
        loss = torch.zeros((), device=self._links.device)
        if last is not None:
            loss = torch.stack(last.losses).mean().to(loss.device)
            if self._data is not None:
                self._links.average(loss, self._data)
        if self._ranks > 1:
            self._links.share(loss, self._ranks - 1, "the loss")
        return loss


class _Run:
    """One pass of a batch: what has come and not been read yet."""

    def __init__(
        self,
        stages: dict[int, Stage],
        links: Links,
        forms: dict[int, Form],
        batch: list[tuple[Any, Any]],
        count: int,
    ) -> None:
        self._stages, self._links, self._forms = stages, links, forms
        self._learns = frozenset(range(count)) - forms.keys()
        self._batch, self._count = batch, count
        self._coming: dict[Action, list[Pending]] = {}
        self._made: dict[Action, Tensors] = {}

    def do(self, order: list[Step]) -> None:
        for step in order:
            if isinstance(step, Action):
                self._compute(step)
            elif step.is_send:
                self._send(step)
            else:
                self._receive(step)

    def _compute(self, action: Action) -> None:
        stage, number = self._stages[action.stage], action.micro_batch
        inputs, targets = self._batch[number]
        if action.way is Pass.FORWARD:
            if action.stage:
                inputs = self._forms[action.stage - 1].filled(self._arrived(action))
            self._made[action] = stage.forward(number, inputs, targets)
            if action.stage + 1 == self._count:
                del self._made[action]
        else:
            gradients = self._arrived(action) if action.stage + 1 < self._count else []
            made = stage.backward(number, gradients)
            if action.stage:
                self._made[action] = tuple(made)

    def _arrived(self, action: Action) -> list[torch.Tensor]:
        """Return what ``action`` reads, as soon as it is there."""
        needed = action.needs
        assert needed is not None
        return [self._links.wait(pending) for pending in self._coming.pop(needed)]

    def _send(self, transfer: Transfer) -> None:
        action = transfer.action
        tensors = self._made.pop(action)
        what = _describe(action)
        if action.way is Pass.FORWARD:
            form = Form.of(tensors)
            if action.stage in self._learns and action.micro_batch == 0:
                self._forms[action.stage] = form
                numbers = torch.tensor(form.encode(), device=self._links.device)
                self._links.send(numbers, transfer.peer, _FORM_TAG, f"the shapes of {what}")
            elif form != self._forms[action.stage]:
                raise BadRequestError(
                    f"stage {action.stage} returned other shapes than for the batch before\n"
                    f"micro-batch {action.micro_batch}: {form}, before: {self._forms[action.stage]}\n"
                    "they may change with the shapes of the batch alone; make a new Pipeline if the "
                    "trained parameters have changed",
                    field="parts",
                )
        for place, tensor in enumerate(one for one in tensors if one is not None):
            self._links.send(tensor, transfer.peer, self._tag(action, place), what)

    def _receive(self, transfer: Transfer) -> None:
        action, device = transfer.action, self._links.device
        what = _describe(action)
        if action.way is Pass.FORWARD:
            if action.stage in self._learns and action.micro_batch == 0:
                numbers = torch.empty(NUMBERS, dtype=torch.int64, device=device)
                pending = self._links.receive(
                    numbers, transfer.peer, _FORM_TAG, f"the shapes of {what}"
                )
                self._forms[action.stage] = Form.decode(self._links.wait(pending).tolist())
            form = self._forms[action.stage]
        else:
            form = self._forms[action.stage - 1].gradients()
        self._coming[action] = [
            self._links.receive(tensor, transfer.peer, self._tag(action, place), what)
            for place, tensor in enumerate(form.empty(device))
        ]

    def _tag(self, action: Action, place: int) -> int:
        """Return the mark by which gloo tells messages of one pair of ranks apart."""
        of_pass = 0 if action.way is Pass.FORWARD else 1
        return (2 * action.stage + of_pass) * NUMBERS + place


def _describe(action: Action) -> str:
    if action.way is Pass.FORWARD:
        return f"the activations of micro-batch {action.micro_batch} out of stage {action.stage}"
    return f"the gradients of micro-batch {action.micro_batch} into stage {action.stage - 1}"


def _device(mesh: DeviceMesh) -> str:
    kind = mesh.device_type
    return kind if kind == "cpu" else f"{kind}:{torch.accelerator.current_device_index()}"


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(one)


def _shapes_of(value: Any) -> tuple[tuple[torch.Size, torch.dtype], ...]:
    return tuple((tensor.shape, tensor.dtype) for tensor in _tensors(value))


def _cut(value: Any, count: int, field: str) -> list[Any]:
    """Cut all tensors of ``value`` along their first dimension into ``count`` micro-batches."""
    if isinstance(value, torch.Tensor):
        rows = value.shape[0] if value.ndim else 0
        if rows == 0 or rows % count:
            raise BadRequestError(
                f"{field} of {rows} sequences do not make {count} micro-batches of equal size\n"
                "give a multiple of the plan's micro_batches",
                field=field,
            )
        return list(torch.split(value, rows // count))
    if isinstance(value, dict):
        cut = {name: _cut(one, count, field) for name, one in value.items()}
        return [{name: one[number] for name, one in cut.items()} for number in range(count)]
    if isinstance(value, tuple | list):
        pieces = [_cut(one, count, field) for one in value]
        return [tuple(one[number] for one in pieces) for number in range(count)]
    return [value] * count
