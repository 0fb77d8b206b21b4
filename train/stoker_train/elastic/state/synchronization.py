"""Send the state of one rank to others: what makes a newcomer equal.

Called by the replica when a generation begins. Every rank of the group calls :func:`sync_state`, and all
get the same error where a tensor differs in shape or type. What is a rank's own (random numbers, memories
of compressors) is not sent. Those on the source's machine read out of its commit; to the others it goes
over the process group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from stoker.exceptions import ConflictError
from stoker_train.elastic.state.memory import Mapped, Place
from stoker_train.elastic.state.trees import FlatState, flatten, unflatten

if TYPE_CHECKING:
    from stoker_train.elastic.state.commits import Commit

__all__ = ("Synced", "sync_state")

_BUCKET_NBYTES = 25 << 20
_ALONE_NBYTES = 1 << 20
"""A tensor of this size is sent by itself: to copy it into a bucket would cost more than a message."""


class Synced(Protocol):
    """A state to sync: see ``TrainState``, whose methods these are."""

    @property
    def shared_names(self) -> tuple[str, ...]:
        """The names of what is the same on all ranks."""

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of what has all its tensors from the beginning."""

    @property
    def device(self) -> torch.device:
        """The device on which tensors are made that this rank lacks."""

    def state_of(self, name: str) -> Any:
        """Return the state of one name, its tensors not copied."""

    def adopt(self, state: Mapping[str, Any]) -> None:
        """Take over a state by name, whose tensors are nobody else's."""


@dataclass(frozen=True, slots=True)
class _Spec:
    shape: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class _Plan:
    """The source's first message: the state without its tensors, and their forms, paths and places."""

    skeleton: Any
    specs: list[_Spec]
    paths: list[str]


@dataclass(frozen=True, slots=True)
class _Answer:
    """A rank's answer to the plan: why it cannot take it, or whether it is to be sent the tensors."""

    problem: str = ""
    needs_tensors: bool = False


def sync_state(
    state: Synced,
    group: Any = None,
    source_rank: int = 0,
    *,
    commit: Commit | None = None,
    needed: bool = True,
) -> None:
    """Give ranks of ``group`` (None: the default) the shared state of its rank ``source_rank``.

    ``commit`` is the source's copy of the state as it is now, if it has one; ``needed``: whether this
    rank is to take it over. ConflictError on all ranks, naming the tensor, where one that needs it has
    another shape, type or name than the source. What such a rank had is in pieces if this fails otherwise:
    it goes back to a commit, or ends.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size == 1:
        return
    wire = _Wire(group, source_rank)
    if rank == source_rank:
        flat, plan = _offered(state, commit)
        wire.send_object(plan)
        answers = _agree(_Answer(), group, size)
        wire.send_tensors(flat.tensors, _receivers(answers))
        return
    plan = wire.send_object(None)
    if not needed:
        _agree(_Answer(), group, size)
        return
    own = flatten({name: state.state_of(name) for name in state.shared_names})
    problem = _difference(state, own, plan)
    mapped = None if problem else _mapped(plan)
    answers = _agree(_Answer(problem, mapped is None), group, size)
    tensors = _targets(own, plan, state.device)
    if mapped is None:
        wire.receive_tensors(tensors, _receivers(answers))
    else:
        torch._foreach_copy_(tensors, mapped)
    state.adopt(unflatten(plan.skeleton, tensors))


def _offered(state: Synced, commit: Commit | None) -> tuple[FlatState, _Plan]:
    """Return what the source sends: of the commit, if there is one, what is shared in it."""
    if commit is None:
        flat = flatten({name: state.state_of(name) for name in state.shared_names})
        places: Mapping[int, Place | None] = {}
    else:
        commit.wait()
        kept = {name: commit.skeleton[name] for name in state.shared_names}
        places = {buffer.tensor.data_ptr(): buffer.place for buffer in commit.buffers}
        flat = flatten(unflatten(kept, commit.tensors))
    specs = [
        _Spec(tuple(t.shape), t.dtype, not t.is_cuda, places.get(t.data_ptr()))
        for t in flat.tensors
    ]
    return flat, _Plan(flat.skeleton, specs, flat.paths)


def _mapped(plan: _Plan) -> list[torch.Tensor] | None:
    """Return the tensors in the source's memory; None if this process cannot reach all of them."""
    reader, found = Mapped(), []
    for spec in plan.specs:
        try:
            if spec.place is None and 0 not in spec.shape:
                return None
            found.append(
                reader.tensor(spec.place, spec.dtype, spec.shape)
                if spec.place is not None
                else torch.empty(spec.shape, dtype=spec.dtype)
            )
        except OSError:
            return None
    return found


def _difference(state: Synced, own: FlatState, plan: _Plan) -> str:
    """Return why this rank cannot take the source's state; empty if it can."""
    names = set(state.shared_names)
    if names != plan.skeleton.keys():
        odd = sorted(names ^ plan.skeleton.keys())[0]
        return f"{odd!r} is in the state of {'this rank' if odd in names else 'the source'} only"
    mine = dict(zip(own.paths, own.tensors, strict=True))
    theirs = dict(zip(plan.paths, plan.specs, strict=True))
    whole = tuple(f"{name}." for name in state.modules)
    for path, spec in theirs.items():
        tensor = mine.get(path)
        if tensor is None:
            if path.startswith(whole):
                return f"{path} is missing"
            continue
        if tuple(tensor.shape) != spec.shape:
            return f"{path} has shape {tuple(tensor.shape)}, at the source {spec.shape}"
        if tensor.dtype != spec.dtype:
            return f"{path} has type {tensor.dtype}, at the source {spec.dtype}"
    extra = next((path for path in mine if path.startswith(whole) and path not in theirs), None)
    return f"{extra} is missing at the source" if extra else ""


def _agree(answer: _Answer, group: Any, size: int) -> list[_Answer]:
    """Return the answers of all ranks; raise the same error on all if one of them has a problem."""
    answers: list[Any] = [None] * size
    dist.all_gather_object(answers, answer, group=group)
    for rank, one in enumerate(answers):
        if one.problem:
            raise ConflictError(
                f"the state of rank {rank} cannot be synced\n"
                f"{one.problem}: have all ranks build the same model, from the same code",
                extra={"rank": rank},
            )
    return answers


def _receivers(answers: Sequence[_Answer]) -> list[int]:
    return [rank for rank, answer in enumerate(answers) if answer.needs_tensors]


def _targets(own: FlatState, plan: _Plan, device: torch.device) -> list[torch.Tensor]:
    """Return what to receive into: this rank's tensors where it has them, else new ones."""
    mine = dict(zip(own.paths, own.tensors, strict=True))
    return [
        mine[path]
        if path in mine
        else torch.empty(spec.shape, dtype=spec.dtype, device="cpu" if spec.on_cpu else device)
        for path, spec in zip(plan.paths, plan.specs, strict=True)
    ]


class _Wire:
    """One rank's messages to others of a group."""

    def __init__(self, group: Any, source_rank: int) -> None:
        self._group = group
        self._size = dist.get_world_size(group)
        self._source = self._global(source_rank)
        # NCCL takes what is on a GPU only.
        nccl = dist.get_backend(group) == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if nccl else None

    def send_object(self, value: Any) -> Any:
        """Return the source's ``value`` on all ranks."""
        held = [value]
        dist.broadcast_object_list(held, src=self._source, group=self._group, device=self._device)
        return held[0]

    def send_tensors(self, tensors: Sequence[torch.Tensor], receivers: Sequence[int]) -> None:
        """Send tensors to ``receivers``: a broadcast if these are all."""
        if not receivers:
            return
        for bucket in _buckets(tensors):
            flat = self._flat(bucket)
            if len(receivers) == self._size - 1:
                dist.broadcast(flat, self._source, group=self._group)
                continue
            sent = [dist.isend(flat, self._global(one), group=self._group) for one in receivers]
            for work in sent:
                if work is not None:
                    work.wait()

    def receive_tensors(self, tensors: Sequence[torch.Tensor], receivers: Sequence[int]) -> None:
        """Write what the source sends into ``tensors``."""
        for bucket in _buckets(tensors):
            flat = self._flat(bucket)
            if len(receivers) == self._size - 1:
                dist.broadcast(flat, self._source, group=self._group)
            else:
                dist.recv(flat, self._source, group=self._group)
            if flat is not bucket[0]:
                parts = torch.split(flat, [one.numel() for one in bucket])
                for one, part in zip(bucket, parts, strict=True):
                    one.copy_(part.view(one.shape))

    def _flat(self, bucket: list[torch.Tensor]) -> torch.Tensor:
        """Return a bucket as one tensor that the group takes; a single one as it is, if it can be."""
        first = bucket[0]
        takes = self._device is None or first.is_cuda
        if len(bucket) == 1 and first.is_contiguous() and takes:
            return first
        return torch.cat([one.reshape(-1) for one in bucket]).to(self._device)

    def _global(self, rank: int) -> int:
        return rank if self._group is None else dist.get_global_rank(self._group, rank)


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield tensors of one type and device that are sent together, the same on every rank."""
    filling: dict[tuple[torch.dtype, bool], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        if tensor.nbytes >= _ALONE_NBYTES:
            yield [tensor]
            continue
        kind = (tensor.dtype, tensor.is_cuda)
        bucket = filling.setdefault(kind, [])
        bucket.append(tensor)
        if sum(one.nbytes for one in bucket) >= _BUCKET_NBYTES:
            yield filling.pop(kind)
    yield from filling.values()
