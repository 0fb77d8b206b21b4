"""The collectives themselves, of a group or of a process set: what users call.

Each call becomes one operation of a lane; it blocks, or returns a handle. NumPy arrays and torch tensors are
taken alike. It decides nothing about failures: lanes and the supervisor do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from stoker.exceptions import BadRequestError
from stoker_train.collective.arrays import (
    as_tensor,
    check_writable,
    device_text,
    dtype_text,
    like,
    shape_text,
    signature,
    write_back,
)
from stoker_train.collective.channel import (
    Channel,
    ReduceOp,
    check_reducible,
    combined,
    ordered,
    reduce_op,
)
from stoker_train.collective.fusion import FUSION_NBYTES, fused
from stoker_train.collective.headers import INLINE_NBYTES, Call
from stoker_train.collective.lane import Inline

if TYPE_CHECKING:
    import torch

    from stoker_train.collective.lane import Handle, Lane, Peers
    from stoker_train.collective.timeline import Timeline

_OBJECT = "a pickled object"


class Communicator:
    """An ordered set of processes, and this one's ``rank`` among them (-1: it is not one of them).

    All members call the same operations in the same order, per communicator; different ones are
    independent. Operations in place return what they were given. Errors are
    :class:`~stoker_train.collective.errors.CollectiveError`; after one that is no ``MismatchError`` the group
    is over, and the contents of its tensors are undefined.
    """

    def __init__(
        self, name: str, ranks: tuple[int, ...], rank: int, lane: Lane | None, peers: Peers | None
    ) -> None:
        self.name = name
        self.ranks = ranks
        """The members, by their ranks in the group."""
        self.rank = rank
        self.size = len(ranks)
        self._lane = lane
        self._peers = peers

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, rank {self.rank} of {self.size})"

    def included(self) -> bool:
        """Return whether this process is a member."""
        return self._lane is not None

    # -- one tensor ------------------------------------------------------------------------------

    def all_reduce(self, tensor: Any, op: str | ReduceOp = ReduceOp.SUM, *, name: str = "") -> Any:
        """Replace ``tensor`` on all members by the combination of all, and return it."""
        return self.all_reduce_async(tensor, op, name=name).wait()

    def all_reduce_async(
        self, tensor: Any, op: str | ReduceOp = ReduceOp.SUM, *, name: str = ""
    ) -> Handle[Any]:
        """Do as :meth:`all_reduce`, without waiting: leave ``tensor`` alone until the handle is done."""
        check_writable(tensor)
        own, how = as_tensor(tensor), reduce_op(op)
        check_reducible(own, how)
        call = _call("all_reduce", how, own, name)
        handle: Handle[Any] = self._start(
            call,
            lambda channel: channel.all_reduce(own, how),
            own,
            take=lambda table: own.copy_(combined(table, how)),
        )
        return handle.then(lambda _: write_back(tensor, own))

    def reduce(
        self, tensor: Any, root: int = 0, op: str | ReduceOp = ReduceOp.SUM, *, name: str = ""
    ) -> Any:
        """Replace ``tensor`` on rank ``root`` by the combination of all; others keep what they have."""
        check_writable(tensor)
        self._check_rank(root, "root")
        own, how = as_tensor(tensor), reduce_op(op)
        check_reducible(own, how)
        if self.rank != root:
            own = own.clone()  # what a reduction leaves elsewhere is undefined
        call = _call("reduce", f"{how} to {root}", own, name)
        self._start(call, lambda channel: channel.reduce(own, root, how), own).wait()
        return write_back(tensor, own) if self.rank == root else tensor

    def broadcast(self, tensor: Any, root: int = 0, *, name: str = "") -> Any:
        """Replace ``tensor`` by that of rank ``root``, and return it."""
        self._check_rank(root, "root")
        if self.rank != root:
            check_writable(tensor)
        own = as_tensor(tensor)
        call = _call("broadcast", f"from {root}", own, name)
        self._start(
            call,
            lambda channel: channel.broadcast(own, root),
            own,
            take=lambda table: own.copy_(table[root]) if self.rank != root else None,
        ).wait()
        return tensor if self.rank == root else write_back(tensor, own)

    def all_gather(self, tensor: Any, *, name: str = "") -> list[Any]:
        """Return the tensors of all members, of one shape, in order of rank."""
        own = as_tensor(tensor)
        call = _call("all_gather", "", own, name)
        table = self._start(
            call, lambda channel: channel.all_gather(own), own, take=lambda table: table.clone()
        ).wait()
        return [like(part, tensor) for part in table.unbind(0)]

    def reduce_scatter(
        self, tensor: Any, op: str | ReduceOp = ReduceOp.SUM, *, name: str = ""
    ) -> Any:
        """Return this member's part of the combination of all ``tensor``.

        ``tensor`` is a list of a tensor for each member, or one whose first dimension they share in equal
        parts; it is left as it is.
        """
        import torch

        if isinstance(tensor, Sequence):
            if len(tensor) != self.size:
                raise BadRequestError(
                    f"reduce_scatter has {len(tensor)} tensors for {self.size} members\n"
                    "give one for each member",
                    field="tensor",
                )
            parts, kind = torch.stack([as_tensor(one) for one in tensor]), tensor[0]
        else:
            own, kind = as_tensor(tensor), tensor
            if not own.ndim or own.shape[0] % self.size:
                raise BadRequestError(
                    f"reduce_scatter cannot share {shape_text(own)} between {self.size} members\n"
                    "its first dimension must be a multiple of their number",
                    field="tensor",
                )
            parts = own.clone().view(self.size, own.shape[0] // self.size, *own.shape[1:])
        how = reduce_op(op)
        check_reducible(parts, how)
        call = _call("reduce_scatter", how, parts, name)
        part = self._start(call, lambda channel: channel.reduce_scatter(parts, how), parts).wait()
        return like(part, kind)

    def barrier(self) -> None:
        """Return once all members have called it."""
        import torch

        nothing = torch.zeros(0)
        self._start(
            Call("barrier"), lambda channel: channel.barrier(), nothing, take=lambda _: None
        ).wait()

    # -- two members -----------------------------------------------------------------------------

    def send(self, tensor: Any, to: int, *, name: str = "") -> None:
        """Send ``tensor`` to rank ``to``, who calls :meth:`recv`; returns once it is on its way."""
        self._check_rank(to, "to")
        own = as_tensor(tensor)
        call = _call("send", "", own, name)
        lane = self._between(self.rank, to)
        lane.submit(call, ordered(own, lambda channel: channel.send(own, 1))).wait()

    def recv(self, tensor: Any, source: int, *, name: str = "") -> Any:
        """Fill ``tensor`` with what rank ``source`` sends, and return it; MismatchError on both if unlike."""
        self._check_rank(source, "source")
        check_writable(tensor)
        own = as_tensor(tensor)
        # Under the sender's own word: both headers are the same then.
        call = _call("send", "", own, name)
        lane = self._between(source, self.rank)
        lane.submit(call, ordered(own, lambda channel: channel.recv(own, 0))).wait()
        return write_back(tensor, own)

    # -- many tensors, and objects ---------------------------------------------------------------

    def grouped_all_reduce(
        self,
        tensors: Sequence[Any],
        op: str | ReduceOp = ReduceOp.SUM,
        *,
        name: str = "",
        fusion_nbytes: int = FUSION_NBYTES,
    ) -> list[Any]:
        """All-reduce many tensors in place, fused to few exchanges of at most ``fusion_nbytes``."""
        how = reduce_op(op)
        for tensor in tensors:
            check_writable(tensor, "tensors")
        own = [as_tensor(tensor, "tensors") for tensor in tensors]
        for one in own:
            check_reducible(one, how)
        call = _grouped_call("grouped_all_reduce", how, own, name)

        def run(channel: Channel) -> None:
            fused(own, lambda buffer: channel.all_reduce(buffer, how), fusion_nbytes)

        self._start(call, run, *own).wait()
        return [write_back(tensor, one) for tensor, one in zip(tensors, own, strict=True)]

    def grouped_broadcast(
        self,
        tensors: Sequence[Any],
        root: int = 0,
        *,
        name: str = "",
        fusion_nbytes: int = FUSION_NBYTES,
    ) -> list[Any]:
        """Replace many tensors by those of rank ``root``, fused."""
        self._check_rank(root, "root")
        own = [as_tensor(tensor, "tensors") for tensor in tensors]
        call = _grouped_call("grouped_broadcast", f"from {root}", own, name)

        def run(channel: Channel) -> None:
            fused(own, lambda buffer: channel.broadcast(buffer, root), fusion_nbytes)

        self._start(call, run, *own).wait()
        if self.rank == root:
            return list(tensors)
        return [write_back(tensor, one) for tensor, one in zip(tensors, own, strict=True)]

    def broadcast_object(self, value: Any = None, root: int = 0, *, name: str = "") -> Any:
        """Return the object of rank ``root``; what others give is ignored."""
        self._check_rank(root, "root")
        packed = _packed(value) if self.rank == root else None

        def run(channel: Channel) -> Any:
            import torch

            length = torch.tensor([0 if packed is None else packed.numel()])
            channel.broadcast(length, root)
            data = torch.empty(int(length), dtype=torch.uint8) if packed is None else packed
            channel.broadcast(data, root)
            return data

        call = Call("broadcast_object", f"from {root}", shape=_OBJECT, name=name)
        data = self._start(call, run).wait()
        return value if self.rank == root else _unpacked(data)

    def all_gather_object(self, value: Any, *, name: str = "") -> list[Any]:
        """Return the objects of all members, in order of rank."""
        packed = _packed(value)

        def run(channel: Channel) -> Any:
            import torch

            lengths = channel.all_gather(torch.tensor([packed.numel()])).view(-1).tolist()
            padded = torch.zeros(max(lengths), dtype=torch.uint8)
            padded[: packed.numel()] = packed
            table = channel.all_gather(padded)
            return [row[:length] for row, length in zip(table, lengths, strict=True)]

        rows = self._start(Call("all_gather_object", shape=_OBJECT, name=name), run).wait()
        return [_unpacked(row) for row in rows]

    def run(self, call: Call, function: Callable[[Channel], Any], *used: Any) -> Handle[Any]:
        """Queue a function of several exchanges as one operation: what other modules are built on.

        ``used`` are the tensors that it reads or writes. All members must give an equal ``call``.
        """
        return self._start(call, function, *used)

    def draw(self, timeline: Timeline | None) -> None:
        """Have this member's calls added to a timeline from now on; None ends it."""
        if self._lane is not None:
            self._lane.timeline = timeline

    def _start(
        self,
        call: Call,
        function: Callable[[Channel], Any],
        *used: torch.Tensor,
        take: Callable[[torch.Tensor], Any] | None = None,
    ) -> Handle[Any]:
        """Queue an operation; with ``take`` few values of the one tensor that is used travel inline."""
        inline = None
        if take is not None and used[0].nbytes <= INLINE_NBYTES and not used[0].is_cuda:
            inline = Inline(used[0], take)
        return self._own_lane().submit(call, ordered(used[0] if used else None, function), inline)

    def _own_lane(self) -> Lane:
        if self._lane is None:
            raise BadRequestError(
                f"this process is not in the process set {self.name!r}\n"
                f"its members are the ranks {list(self.ranks)}: look at included() first",
                field="process_set",
            )
        return self._lane

    def _between(self, source: int, to: int) -> Lane:
        if self._peers is None:
            raise BadRequestError(
                f"send and recv are of whole groups, not of {self.name!r}\n"
                "call them on the group that the process set is part of",
                field="process_set",
            )
        return self._peers.lane(source, to)

    def _check_rank(self, rank: int, field: str) -> None:
        if not 0 <= rank < self.size:
            raise BadRequestError(
                f"{field}={rank} is no rank of {self.name!r}\ngive one of 0..{self.size - 1}",
                field=field,
            )


def _call(operation: str, detail: str, tensor: torch.Tensor, name: str) -> Call:
    """Return the call of an operation on one tensor."""
    dtype, shape = dtype_text(tensor), shape_text(tensor)
    return Call(operation, detail, dtype, shape, name, device_text(tensor))


def _grouped_call(operation: str, detail: str, tensors: Sequence[torch.Tensor], name: str) -> Call:
    """Return the call of an operation on many tensors."""
    return Call(operation, detail, "", signature(tensors), name, device_text(*tensors))


def _packed(value: Any) -> torch.Tensor:
    import cloudpickle
    import torch

    return torch.frombuffer(bytearray(cloudpickle.dumps(value)), dtype=torch.uint8)


def _unpacked(data: torch.Tensor) -> Any:
    import pickle

    return pickle.loads(data.numpy().tobytes())
