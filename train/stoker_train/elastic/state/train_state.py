"""The state of a training loop: what commits keep, restores bring back and newcomers are sent.

``ctx.state(...)`` makes one; the replica commits it between steps. It knows of no group and no disk:
:mod:`synchronization` sends it, :mod:`checkpoints` writes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from stoker.exceptions import BadRequestError, NameTakenError
from stoker_train.elastic.state.commits import Commit, Commits
from stoker_train.elastic.state.rng import RandomState
from stoker_train.elastic.state.synchronization import sync_state
from stoker_train.elastic.state.trees import (
    FlatState,
    flatten,
    from_portable,
    to_portable,
    unflatten,
)

__all__ = ("TrainState",)

_log = logging.getLogger(__name__)
_VERSION = 1


class TrainState:
    """A model, its optimizer, its schedule, and whatever else must come through a crash.

    An object with ``state_dict`` and ``load_state_dict`` is kept by these. Any other value is kept itself,
    and read and set as an attribute::

        state = ctx.state(model=model, optimizer=optimizer, best_loss=math.inf)
        state.best_loss = min(state.best_loss, loss)

    SerializationError, with its name, for what cannot be pickled. For one thread.
    """

    def __init__(
        self, *, model: Any = None, optimizer: Any = None, scheduler: Any = None, **objects: Any
    ) -> None:
        own: dict[str, Any] = {
            "_objects": {},
            "_values": {},
            "_per_rank": set(),
            "_given": set(),
            "_unclaimed": {},
            "_callbacks": [],
            "_commits": Commits(),
            "_hooked": set(),
            "_made": {},
        }
        self.__dict__.update(own)
        given = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        for name, value in {
            **{name: value for name, value in given.items() if value is not None},
            **objects,
        }.items():
            self.register(name, value)
            self._given.add(name)
        self.register("rng", RandomState(), per_rank=True)

    def register(self, name: str, value: Any, *, per_rank: bool = False) -> None:
        """Keep ``value`` too, under ``name``; ``per_rank``: each rank has its own, never sent to others.

        What a checkpoint held under a name that was not registered yet is loaded now. NameTakenError if it
        is taken.
        """
        if name in self._objects or name in self._values or hasattr(type(self), name):
            raise NameTakenError(
                f"{name!r} of the train state is taken\ngive it another name", field=name
            )
        if _has_state(value):
            self._objects[name] = value
        else:
            self._values[name] = value
        try:
            flatten(self.state_of(name), name)
        except BaseException:
            self._objects.pop(name, None)
            self._values.pop(name, None)
            raise
        if per_rank:
            self._per_rank.add(name)
        if name in self._unclaimed:
            self._load(name, self._unclaimed.pop(name))

    def on_reset(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called after each change of membership, once the state is that of all."""
        self._callbacks.append(callback)

    def run_reset_callbacks(self) -> None:
        """Call what :meth:`on_reset` was given, in order."""
        for callback in self._callbacks:
            callback()

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in the order in which they were registered."""
        return (*self._objects, *self._values)

    @property
    def shared_names(self) -> tuple[str, ...]:
        """The names of what is the same on all ranks."""
        return tuple(name for name in self.names if name not in self._per_rank)

    @property
    def committed_steps(self) -> tuple[int, ...]:
        """The steps that :meth:`restore` can go back to, ascending: the last two commits."""
        return self._commits.steps  # type: ignore[no-any-return]

    @property
    def random(self) -> RandomState:
        """The random generators of this rank."""
        return self._objects["rng"]  # type: ignore[no-any-return]

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of what is a module: its tensors are all there from the beginning."""
        return tuple(name for name, one in self._objects.items() if _is_module(one))

    @property
    def device(self) -> torch.device:
        """The device of the first parameter; the CPU if there is none."""
        for name in self.modules:
            for parameter in self._objects[name].parameters():
                return parameter.device  # type: ignore[no-any-return]
        return torch.device("cpu")

    def state_of(self, name: str) -> Any:
        """Return the state of what is registered as ``name``; its tensors are not copied."""
        return self._objects[name].state_dict() if name in self._objects else self._values[name]

    def sync(
        self,
        group: Any = None,
        source_rank: int = 0,
        *,
        step: int | None = None,
        needed: bool = True,
    ) -> None:
        """Take over the shared state of ``source_rank``, a rank of ``group``: every rank of it calls this.

        ``needed``: whether this rank is to, as newcomers and those are that went back. Those on the machine
        of the source read its tensors on the CPU out of a copy in memory: its commit of ``step`` if it says
        that this is the present state, else one made now in place of the older commit. ConflictError on all
        ranks, naming the tensor, where one has another shape, type or name.
        """
        commit = None
        if dist.get_rank(group) == source_rank:
            commit = self._to_read() if step is None else self._commits.get(step)
        sync_state(self, group, source_rank, commit=commit, needed=needed)

    def adopt(self, state: Mapping[str, Any]) -> None:
        """Take over a state by name, as :meth:`capture` returns it, whose tensors are nobody else's."""
        for name, one in state.items():
            self._load(name, one)

    def capture(self) -> dict[str, Any]:
        """Return the state by name. Its tensors are those of the model and the rest, not copies."""
        return {name: self.state_of(name) for name in self.names}

    def commit(self, step: int) -> None:
        """Keep a copy of the state after ``step`` steps in memory, in place of the commit before the last."""
        flat = flatten(self.capture())
        self._commits.add(step, flat, self._settled(flat))

    def before_update(self) -> None:
        """Let the copies of a commit be done before parameters change.

        The step of an optimizer calls it by itself; whoever changes parameters otherwise does.
        """
        self._commits.wait()

    def restore(self, step: int) -> None:
        """Go back to the commit of ``step``; later ones are void. NotFoundError if it is not kept."""
        commit = self._commits.get(step)
        commit.wait()
        self._load_all(FlatState(commit.skeleton, commit.tensors, commit.paths))
        self._commits.forget(step)

    def warm(self) -> None:
        """Make the memory that training needs: a newcomer does so while the others train on.

        Optimizers get their state by a step with gradients and a learning rate of 0, which changes no
        parameter; both commits get their buffers. What the state holds then counts for nothing: it is to be
        synced.
        """
        for name, one in self._objects.items():
            if isinstance(one, torch.optim.Optimizer) and not one.state:
                self._made[name] = [_options(group) for group in one.param_groups]
                _make_state(one)
        if not self.committed_steps:
            flat = flatten(self.capture())
            for step in range(2):
                self._commits.add(step, flat, [False] * len(flat.tensors))
            self._commits.forget(-1)

    def begin_anew(self) -> None:
        """Take from optimizers the state that :meth:`warm` has made: nobody has trained before."""
        for name, before in self._made.items():
            optimizer = self._objects[name]
            optimizer.state.clear()
            for group, options in zip(optimizer.param_groups, before, strict=True):
                for added in group.keys() - options.keys() - {"params"}:
                    del group[added]
                group.update(options)
        self._made.clear()

    @contextmanager
    def committed_own(self, step: int) -> Iterator[dict[str, Any]]:
        """Yield, as :meth:`committed`, what is this rank's alone: see :meth:`load_own`."""
        with self._commits.hold(step) as commit:
            whole = self._payload(commit)
            yield {"version": _VERSION, "per_rank": whole["per_rank"]}

    @contextmanager
    def committed(self, step: int) -> Iterator[dict[str, Any]]:
        """Yield what :meth:`state_dict` returned at the commit of ``step``, unchanged within this block.

        What to write to disk, from any thread: commits that come meanwhile go elsewhere.
        """
        with self._commits.hold(step) as commit:
            yield self._payload(commit)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as ``torch.save`` gets it and ``torch.load(weights_only=True)`` reads it.

        ``version``, ``shared`` and ``per_rank``, the last two by name. Tensors are not copied; objects that
        are neither tensors nor plain are pickles in tensors of bytes.
        """
        flat = flatten(self.capture())
        return self._portable(to_portable(flat.skeleton, flat.tensors))

    def load_state_dict(
        self, payload: Mapping[str, Any], per_rank: Mapping[str, Any] | None = None
    ) -> None:
        """Take over what :meth:`state_dict` returned; ``per_rank``, if given, in place of the one in it.

        BadRequestError if the payload lacks what was given to the constructor, or is of another version.
        """
        if payload.get("version") != _VERSION:
            raise BadRequestError(
                f"the checkpoint is of version {payload.get('version')!r}, not {_VERSION}\n"
                "load it with the version of Stoker that wrote it",
                field="version",
            )
        mine = payload["per_rank"] if per_rank is None else per_rank
        state = from_portable({**payload["shared"], **mine})
        missing = sorted(self._given - state.keys())
        if missing:
            raise BadRequestError(
                f"the checkpoint has no {missing[0]!r}\nit has {', '.join(sorted(state))}: "
                "is it of another job, or has the loop changed?",
                field=missing[0],
            )
        self._load_all(flatten(state))

    def load_own(self, payload: Mapping[str, Any]) -> None:
        """Take over what is this rank's alone, as :meth:`committed_own` or ``state_dict`` had it."""
        for name, one in from_portable(dict(payload["per_rank"])).items():
            self._load(name, one)

    def __getattr__(self, name: str) -> Any:
        for kept in (self.__dict__.get("_values", {}), self.__dict__.get("_objects", {})):
            if name in kept:
                return kept[name]
        raise AttributeError(f"the train state has no {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._values:
            self._values[name] = value
        elif name in self._objects:
            raise AttributeError(f"{name!r} of the train state has a state of its own: load it")
        else:
            raise AttributeError(f"the train state has no {name!r}: give it to ctx.state() first")

    def _payload(self, commit: Commit) -> dict[str, Any]:
        if commit.copied is not None:
            commit.copied.synchronize()
        return self._portable(to_portable(commit.skeleton, commit.tensors))

    def _portable(self, state: dict[str, Any]) -> dict[str, Any]:
        shared = {name: one for name, one in state.items() if name not in self._per_rank}
        own = {name: one for name, one in state.items() if name in self._per_rank}
        return {"version": _VERSION, "shared": shared, "per_rank": own}

    def _load_all(self, flat: FlatState) -> None:
        """Take over a state by name, whose tensors stay those of the caller."""
        state = unflatten(flat.skeleton, flat.tensors)
        copied = unflatten(flat.skeleton, self._copied(flat))
        for name in flat.skeleton:
            # A module copies into its own tensors, and refuses what does not fit.
            self._load(name, (state if name in self.modules else copied)[name])

    def _copied(self, flat: FlatState) -> list[torch.Tensor]:
        """Return copies of the tensors, in this state's own memory where it has such."""
        others = {name: self.state_of(name) for name in self.names if name not in self.modules}
        own = flatten(others)
        mine = dict(zip(own.paths, own.tensors, strict=True))
        modules = tuple(f"{name}." for name in self.modules)
        copies: list[torch.Tensor] = []
        for path, tensor in zip(flat.paths, flat.tensors, strict=True):
            if path.startswith(modules):
                copies.append(tensor)
                continue
            target = mine.get(path)
            if target is None or (target.shape, target.dtype) != (tensor.shape, tensor.dtype):
                target = torch.empty_like(tensor)
            copies.append(target.copy_(tensor))
        return copies

    def _load(self, name: str, state: Any) -> None:
        """Set one object or value, from tensors that are nobody else's."""
        if name in self._objects:
            self._objects[name].load_state_dict(state)
        elif name in self._values:
            old = self._values[name]
            if not (
                torch.is_tensor(old)
                and torch.is_tensor(state)
                and old.data_ptr() == state.data_ptr()
            ):
                self._values[name] = (
                    state  # else it was written into the old one, which others hold
                )
        else:
            self._unclaimed[name] = state

    def _to_read(self) -> Commit | None:
        """Return a copy of the state that others on this machine can read; None where it is on a GPU."""
        flat = flatten(self.capture())
        if any(tensor.is_cuda for tensor in flat.tensors):
            return None
        return self._commits.scratch(flat)  # type: ignore[no-any-return]

    def _settled(self, flat: FlatState) -> list[bool]:
        """Return which tensors change in an optimizer's step only, and see to it that it waits."""
        if not any(tensor.is_cuda for tensor in flat.tensors):
            return [False] * len(flat.tensors)
        settled: set[int] = set()
        for name, one in self._objects.items():
            if isinstance(one, torch.optim.Optimizer):
                if name not in self._hooked:
                    self._hooked.add(name)
                    one.register_step_pre_hook(lambda *_: self.before_update())
                for group in one.param_groups:
                    settled.update(parameter.data_ptr() for parameter in group["params"])
                for kept in one.state.values():
                    settled.update(t.data_ptr() for t in kept.values() if torch.is_tensor(t))
        return [tensor.data_ptr() in settled for tensor in flat.tensors]


def _is_module(value: Any) -> bool:
    return isinstance(value, torch.nn.Module)


def _has_state(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group of parameters, as they are now."""
    return {
        name: one.clone() if torch.is_tensor(one) else one
        for name, one in group.items()
        if name != "params"
    }


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Have an optimizer make its state; parameters, gradients and options are as before."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    before = [one.grad for one in parameters]
    rates = [group["lr"] for group in optimizer.param_groups]
    values = [one.detach().clone() for one in parameters]
    try:
        for one in parameters:
            one.grad = torch.zeros_like(one) if one.requires_grad else None
        for group in optimizer.param_groups:
            group["lr"] = torch.zeros_like(rate) if torch.is_tensor(rate := group["lr"]) else 0.0
        optimizer.step()
    except Exception as error:
        _log.info("an optimizer gets its state by its first step, as this one failed: %s", error)
        optimizer.state.clear()
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        with torch.no_grad():
            for one, gradient, value in zip(parameters, before, values, strict=True):
                one.grad = gradient
                one.copy_(value)
