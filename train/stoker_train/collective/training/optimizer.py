"""``DistributedOptimizer``: an optimizer whose gradients are those of all members, as Horovod's.

Gradients are exchanged in buckets as the backward pass makes them, so that most of the exchange is over
when it ends; by a compressor of ``stoker_kernels``, if one is given. Called by user code in place of its
optimizer.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from stoker.exceptions import BadRequestError
from stoker_train.collective.arrays import device_text, dtype_text
from stoker_train.collective.channel import Channel, ReduceOp
from stoker_train.collective.fusion import buckets, fused
from stoker_train.collective.headers import Call
from stoker_train.collective.joining import group

if TYPE_CHECKING:
    from stoker_kernels.compression import Compressor
    from stoker_train.collective.communicator import Communicator
    from stoker_train.collective.lane import Handle

BUCKET_NBYTES = 25 * 2**20
_OPS = ("mean", "sum", "adasum")


class DistributedOptimizer(Optimizer):
    """Wraps ``optimizer``: its steps use the gradients of all members of ``process_set`` (the default group).

    ::

        optimizer = DistributedOptimizer(SGD(model.parameters(), lr=0.1), model.named_parameters())
        loss.backward()        # buckets are exchanged meanwhile
        optimizer.step()       # waits for the last of them

    ``op`` is ``"mean"``, ``"sum"`` or ``"adasum"``. ``compression`` is a compressor of ``stoker_kernels``, or
    its name. With ``backward_passes_per_step=n`` gradients add up in ``n`` backward passes and are exchanged
    in the last of them. To clip gradients, call :meth:`synchronize` first::

        optimizer.synchronize()
        clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()

    Parameter groups, state and ``state_dict`` are those of ``optimizer``; a compressor's memory, which each
    member has for itself, is in ``compressor.state_dict()``. All members need the same parameters in the same
    order; one that has no gradient in a step counts as zeros.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        *,
        compression: Compressor | str | None = None,
        op: str = "mean",
        backward_passes_per_step: int = 1,
        process_set: Communicator | None = None,
        bucket_nbytes: int = BUCKET_NBYTES,
        sparse_as_dense: bool = False,
    ) -> None:
        if backward_passes_per_step < 1:
            raise BadRequestError(
                f"backward_passes_per_step={backward_passes_per_step}\ngive a number from 1",
                field="backward_passes_per_step",
            )
        self.optimizer = optimizer
        self.members = process_set or group()
        self.op = _op(op)
        self.compressor = _compressor(compression, self.op)
        self.backward_passes_per_step = backward_passes_per_step
        self._sparse_as_dense = sparse_as_dense
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._share()
        named = _named(optimizer, named_parameters)
        named.reverse()  # about the order in which the backward pass makes them
        self._names = {parameter: name for name, parameter in named}
        sizes = [((p.dtype, p.device), p.nbytes) for _, p in named]
        self._buckets = [
            [named[place][1] for place in places] for places in buckets(sizes, bucket_nbytes)
        ]
        self._bucket_of = {p: at for at, bucket in enumerate(self._buckets) for p in bucket}
        self._lock = threading.RLock()
        self._begin_step()
        self._synchronized = False
        self._synchronizes = True
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            for parameter in self._bucket_of
        ]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for the exchange, and make a step of the optimizer."""
        if closure is not None:
            return self.optimizer.step(self._exchanged(closure))
        if self._synchronizes and not self._synchronized:
            self.synchronize()
        self._synchronized = False
        return self.optimizer.step()

    def synchronize(self) -> None:
        """Exchange what is left, and wait for all: ``.grad`` of each parameter is that of all members then.

        Raises the group's error if a member was lost; gradients are undefined then.
        """
        with self._lock:
            for at in range(len(self._handles), len(self._buckets)):
                self._launch(at)
            handles = self._handles
            self._begin_step()
        failure: BaseException | None = None
        for handle in handles:
            try:
                handle.wait()
            except BaseException as error:
                failure = failure or error
        if failure is not None:
            raise failure
        self._synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Have ``step`` inside take the gradients as they are: :meth:`synchronize` was called."""
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True
            self._synchronized = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; BadRequestError while some of them are being exchanged."""
        if self._handles:
            raise BadRequestError(
                "zero_grad() was called between backward() and step()\n"
                "call step() or synchronize() first: gradients are being exchanged",
                field="zero_grad",
            )
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer's."""
        self.optimizer.load_state_dict(state_dict)
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: the buckets are made. (The constructor's own calls pass.)"""
        if "_buckets" in self.__dict__:
            raise BadRequestError(
                "parameters cannot be added to a DistributedOptimizer\n"
                "add them to the optimizer before it is wrapped",
                field="param_group",
            )
        super().add_param_group(param_group)

    def detach(self) -> None:
        """Remove the hooks from the parameters: the optimizer inside is as it was."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _share(self) -> None:
        self.param_groups = self.optimizer.param_groups
        self.state = self.optimizer.state

    def _begin_step(self) -> None:
        self._passes: dict[torch.Tensor, int] = {}
        self._left = [len(bucket) for bucket in self._buckets]
        self._handles: list[Handle[None]] = []

    def _exchanged(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            loss = closure()
            self.synchronize()
            self._synchronized = False
            return loss

        return run

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        with self._lock:
            self._synchronized = False  # whatever was exchanged: this gradient is not yet
            passes = self._passes[parameter] = self._passes.get(parameter, 0) + 1
            if passes > self.backward_passes_per_step:
                raise BadRequestError(
                    f"backward() was called {passes} times before step()\n"
                    f"give backward_passes_per_step={passes}, so that gradients add up before they "
                    "are exchanged",
                    field="backward_passes_per_step",
                )
            if passes == self.backward_passes_per_step:
                self._left[self._bucket_of[parameter]] -= 1
                # In one order on all members, whatever that of the backward pass is.
                while len(self._handles) < len(self._buckets):
                    if self._left[len(self._handles)]:
                        break
                    self._launch(len(self._handles))

    def _launch(self, at: int) -> None:
        bucket = self._buckets[at]
        gradients = {self._names[p]: self._gradient(p) for p in bucket}
        tensors = list(gradients.values())
        values = sum(one.numel() for one in tensors)
        method = self.compressor.name if self.compressor is not None else "all_reduce"
        call = Call(
            "gradients",
            f"{self.op} by {method}",
            dtype_text(tensors[0]),
            f"({values},)",
            f"bucket {at} of {len(self._buckets)}",
            device_text(*tensors),
        )
        run = self._plain if self.compressor is None else self._compressed
        self._handles.append(
            self.members.run(call, lambda channel: run(channel, gradients), *tensors)
        )

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.is_sparse:
            if not self._sparse_as_dense:
                raise BadRequestError(
                    f"the gradient of {self._names[parameter]} is sparse\n"
                    "give sparse_as_dense=True, or an embedding with sparse=False",
                    field="sparse_as_dense",
                )
            parameter.grad = parameter.grad.to_dense()
        return parameter.grad.detach()

    def _plain(self, channel: Channel, gradients: dict[str, torch.Tensor]) -> None:
        op = ReduceOp(self.op)
        fused(list(gradients.values()), lambda buffer: channel.all_reduce(buffer, op))

    def _compressed(self, channel: Channel, gradients: dict[str, torch.Tensor]) -> None:
        from stoker_kernels.compression import GradientExchange

        assert self.compressor is not None
        results = GradientExchange(self.compressor, _Workers(channel)).average(gradients)
        for name, gradient in gradients.items():
            result = results[name]
            gradient.copy_(result * self.members.size if self.op == "sum" else result)


class _Workers:
    """A channel as the exchanges of ``stoker_kernels`` want it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def mean_(self, buffer: torch.Tensor) -> None:
        self._channel.all_reduce(buffer, ReduceOp.MEAN)

    def gather(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        return list(self._channel.all_gather(buffer).unbind(0))


def _op(op: str) -> str:
    found = "mean" if op == "average" else str(op)
    if found not in _OPS:
        raise BadRequestError(
            f"gradients are not combined by {op!r}\ngive one of {', '.join(_OPS)}", field="op"
        )
    return found


def _compressor(compression: Compressor | str | None, op: str) -> Compressor | None:
    if op == "adasum":
        if compression is not None:
            raise BadRequestError(
                "op='adasum' takes no compression\nleave one of them out", field="compression"
            )
        compression = "adasum"
    if compression is None:
        return None
    from stoker_kernels.compression import COMPRESSORS, make_compressor

    if not isinstance(compression, str):
        return compression
    if compression not in COMPRESSORS:
        raise BadRequestError(
            f"there is no compression {compression!r}\ngive one of {', '.join(COMPRESSORS)}",
            field="compression",
        )
    return make_compressor(compression)


def _named(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> list[tuple[str, torch.Tensor]]:
    """Return the optimizer's parameters that are trained, with their names."""
    own = [
        parameter
        for param_group in optimizer.param_groups
        for parameter in param_group["params"]
        if parameter.requires_grad
    ]
    if named_parameters is None:
        return [(f"parameter {number}", parameter) for number, parameter in enumerate(own)]
    named = list(named_parameters)
    names = {parameter: name for name, parameter in named}
    if len({name for name, _ in named}) != len(named):
        raise BadRequestError(
            "named_parameters has a name twice\ngive model.named_parameters()",
            field="named_parameters",
        )
    unnamed = sum(parameter not in names for parameter in own)
    if unnamed:
        raise BadRequestError(
            f"named_parameters lacks {unnamed} parameters of the optimizer\n"
            "give those of the whole model: model.named_parameters()",
            field="named_parameters",
        )
    return [(names[parameter], parameter) for parameter in own]
