"""Sums of the replicas' gradients, sent bucket by bucket while the backward pass goes on.

The end of a replica's step drives it, through a strategy; a new one is made for each generation's group.
It knows no optimizer, and it decides nothing. A step::

    exchange.begin(share=size / count, gradients=strategy.exchanges_gradients(step))
    for loss in micro_batches:            # each weighted: loss * micro_size / count
        if it_is_the_last:
            exchange.arm()
        loss.backward()
    strategy.before_optimizer(exchange, params)
    optimizer.step()
    strategy.after_optimizer(exchange, params, optimizer, step)

Gradients are weighted by samples already, so that their sum over the ranks is the batch's mean, whatever
the sizes of the shares. A rank with no samples calls ``begin`` and ``arm`` too, without a backward pass.
Collectives run in the order of the buckets, on all ranks, whichever gradients come first or never.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from stoker_train.elastic.sync.buckets import MIB, Bucket, buckets_of

if TYPE_CHECKING:
    from stoker_kernels.compression import Compressor

    Square = Callable[[Sequence[torch.nn.Parameter]], torch.Tensor]


class Handle(Protocol):
    """A collective that was launched."""

    def wait(self) -> Any:
        """Return once its result may be used; raises what went wrong."""


class GradientExchange:
    """The exchange of one model's gradients over one process group (the default one if None).

    ``params`` are the parameters, or pairs with their names, in the same order on every rank. ``nodes`` is
    the node of each rank, where a strategy must know. With a ``compressor`` (see
    :func:`stoker_kernels.make_compressor`) less is sent; whoever gave it keeps its memory.
    :meth:`close` it before its process group ends.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter] | Iterable[tuple[str, torch.nn.Parameter]],
        group: dist.ProcessGroup | None = None,
        bucket_nbytes: int = 25 * MIB,
        *,
        compressor: Compressor | None = None,
        nodes: Sequence[str] | None = None,
    ) -> None:
        if bucket_nbytes < 1:
            raise ValueError(f"bucket_nbytes is {bucket_nbytes}: it must be 1 or more")
        named = [
            one if isinstance(one, tuple) else (str(number), one)
            for number, one in enumerate(params)
        ]
        self.params = tuple(param for _, param in named if param.requires_grad)
        self.buckets = buckets_of([one for one in named if one[1].requires_grad], bucket_nbytes)
        self.group, self.nodes, self.compressor = group, nodes, compressor
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        self.workers = dist.get_world_size(group) if dist.is_initialized() else 1
        self.share = 1.0
        """The part of the step's samples that this rank has."""
        self.waited_s = 0.0
        """How long the last :meth:`finish` waited for the network, by the clock of this process."""
        self.sent_nbytes = 0
        """The size of everything sent so far, as this rank hands it to a collective."""
        self.collectives = 0
        self.local_square: torch.Tensor | None = None
        """|g|^2 of this rank's weighted gradient before the exchange, float64, on its device."""
        self._square: Square | None = None
        self._gradients = True
        self._armed = False
        self._next = 0
        self._handles: list[tuple[Bucket, Handle]] = []
        self._others: list[Handle] = []
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._route: tuple[dist.ProcessGroup | None, int] = (group, self.workers)
        self._thread: ThreadPoolExecutor | None = None
        self._hooks = [
            _hook(param, partial(self._accumulated, bucket, place))
            for bucket in self.buckets
            for place, param in enumerate(bucket.params)
        ]

    # -- a step -----------------------------------------------------------------------------------

    def begin(self, share: float, gradients: bool = True) -> None:
        """Begin a step in which this rank has ``share`` of the samples; not ``gradients``: it stays local."""
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"share is {share}: it must be from 0 to 1, this rank's part of M")
        self.share, self._gradients = share, gradients
        self.local_square, self.summed_share = None, 1.0
        self._square = None

    def measure(self, square: Square) -> None:
        """Have the step that was begun set ``local_square``: the sum over buckets of their ``square``."""
        self._square = square

    @property
    def sums_gradients(self) -> bool:
        """Whether the step that was begun exchanges gradients."""
        return self._gradients and self.workers > 1

    def route(self, group: dist.ProcessGroup | None, workers: int) -> None:
        """Sum gradients over ``group`` from now on, a part of this exchange's own."""
        self._route = (group, workers)

    def compress(self, compressor: Compressor | None) -> None:
        """Send gradients through ``compressor`` from now on; None: as they are."""
        self.compressor = compressor

    def arm(self) -> None:
        """Have the backward pass that follows launch each bucket once it is full. Once in a step."""
        if not self._gradients:
            return
        for bucket in self.buckets:
            bucket.waiting = set(range(len(bucket.params)))
        self._next, self._failure, self._armed = 0, None, True

    def finish(self) -> None:
        """Launch what the backward pass did not fill, wait for all, and write the sums to the gradients.

        Every collective that was launched is waited for, even if one fails; then the first error is raised.
        """
        if not self._armed:
            self.arm()
        with self._lock:
            self._armed = False
            self._launch(whole=True)
        began = time.perf_counter()
        failure = self._wait()
        self.waited_s = time.perf_counter() - began
        if failure is not None:
            raise failure

    def cancel(self) -> None:
        """Give up a step whose backward pass failed: waits for what was launched, raises nothing of it."""
        with self._lock:
            self._armed = False
        self._wait()

    def keep_local(self) -> None:
        """Scale this rank's gradients to the mean over its own samples: a step that stays local.

        Zeros where it has no samples, so that all ranks' optimizers have the same state.
        """
        grads = [param.grad for param in self.params if param.grad is not None]
        if self.share == 0.0:
            for param in self.params:
                param.grad = torch.zeros_like(param)
        elif grads:
            torch._foreach_mul_(grads, 1.0 / self.share)

    # -- what else travels ------------------------------------------------------------------------

    def start_sum(self, tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> Handle:
        """Launch the sum of ``tensor`` over all ranks of ``group``, in place (this exchange's if None)."""
        self.sent_nbytes += tensor.nbytes
        self.collectives += 1
        handle: Handle = dist.all_reduce(tensor, group=group or self.group, async_op=True)
        return handle

    def launch(self, tensor: torch.Tensor) -> Handle:
        """Do :meth:`start_sum` for a strategy that waits later; :meth:`close` waits for it at the latest."""
        handle = self.start_sum(tensor)
        self._others = [other for other in self._others if not _done(other)]
        self._others.append(handle)
        return handle

    # -- life -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Remove the hooks and wait for every collective. Errors of these are of no interest any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.cancel()
        for handle in self._others:
            _settled(handle)
        self._others = []
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _accumulated(self, bucket: Bucket, place: int, _: torch.Tensor) -> None:
        with self._lock:  # a backward pass has a thread for each device
            if self._armed:
                bucket.waiting.discard(place)
                self._launch(whole=False)

    def _launch(self, whole: bool) -> None:
        """Launch the buckets that are next in order and full, or all. Errors are raised by ``finish``."""
        while self._failure is None and self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            if bucket.waiting and not whole:
                return
            self._next += 1
            try:
                self._send(bucket)
            except BaseException as error:
                self._failure = error

    def _send(self, bucket: Bucket) -> None:
        if self._square is not None:
            square = self._square(bucket.params)
            self.local_square = square if self.local_square is None else self.local_square + square
        group, workers = self._route
        if workers == 1:
            return
        if self.compressor is None:
            self._handles.append((bucket, self.start_sum(bucket.pack(), group)))
            return
        work = partial(_compressed, self, bucket, group, workers)
        if bucket.params[
            0
        ].is_cuda:  # NCCL is asynchronous by itself, and a thread has another stream
            self._handles.append((bucket, _Finished(work())))
        else:
            self._thread = self._thread or ThreadPoolExecutor(1, "stoker-gradients")
            self._handles.append((bucket, _Pending(self._thread.submit(work))))

    def _wait(self) -> BaseException | None:
        """Wait for all handles, write what came, and return the first error."""
        failure, self._failure = self._failure, None
        handles, self._handles = self._handles, []
        for bucket, handle in handles:
            error = _settled(handle)
            failure = failure or error
            if failure is None and self.compressor is None:
                bucket.unpack()
        return failure


class _Finished:
    """A handle of work that was done at once."""

    def __init__(self, result: object) -> None:
        self.result = result

    def wait(self) -> None:
        """Return."""


class _Pending:
    """A handle of work in the exchange's own thread."""

    def __init__(self, future: Future[None]) -> None:
        self.future = future

    def wait(self) -> None:
        """Return once the thread is done with it."""
        self.future.result()


def _compressed(
    exchange: GradientExchange, bucket: Bucket, group: dist.ProcessGroup | None, workers: int
) -> None:
    """Exchange one bucket through the compressor.

    A compressor takes means. What it is given is ``workers`` times the weighted gradient, that is a local
    mean: so what it keeps back has one scale, whatever the number of replicas.
    """
    from stoker_kernels.compression import GradientExchange as CompressedExchange
    from stoker_kernels.compression import TorchGroup

    assert exchange.compressor is not None
    over = TorchGroup(group)
    grads = {
        name: torch.zeros_like(param) if param.grad is None else param.grad * workers
        for name, param in zip(bucket.names, bucket.params, strict=True)
    }
    first = next(iter(grads.values()))
    flags = torch.tensor([float(p.grad is not None) for p in bucket.params], device=first.device)
    over.mean_(flags)
    network = CompressedExchange(exchange.compressor, over)
    results = network.average(grads)
    exchange.sent_nbytes += network.sent_nbytes + flags.nbytes
    exchange.collectives += 1
    used = flags.tolist() if any(p.grad is None for p in bucket.params) else None
    for place, (name, param) in enumerate(zip(bucket.names, bucket.params, strict=True)):
        if param.grad is not None:
            param.grad.copy_(results[name])
        elif used is not None and used[place]:
            param.grad = results[name]


def _hook(param: torch.nn.Parameter, call: Callable[[torch.Tensor], None]) -> Any:
    return param.register_post_accumulate_grad_hook(call)  # type: ignore[no-untyped-call]


def _settled(handle: Handle) -> BaseException | None:
    """Wait for a handle; returns its error."""
    try:
        handle.wait()
    except BaseException as error:
        return error
    return None


def _done(handle: Handle) -> bool:
    return bool(getattr(handle, "is_completed", lambda: False)())
