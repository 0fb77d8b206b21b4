"""Loops in the style of Horovod's elastic API: ``stoker.train.elastic.run`` and its states.

::

    from stoker.train import elastic

    @elastic.run
    def train(state):
        for state.epoch in range(state.epoch, epochs):
            for batch in batches:
                ...
                state.commit()

    def loop(ctx):                              # given to ElasticTrainer
        train(elastic.TorchState(model=model, optimizer=optimizer, epoch=0))

The names and what they do are Horovod's (``horovod.torch.elastic``); the membership, commits and
checkpoints are those of the replica that runs the loop. Such a loop reads its data itself: what an
:class:`ElasticSampler` of its :class:`TorchState` has recorded is in the ledger, of other data nothing is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar

from torch.utils.data import Sampler

from stoker.exceptions import BadRequestError
from stoker_train.elastic.core.sampler import epoch_order
from stoker_train.elastic.replica.current import current

__all__ = (
    "ElasticSampler",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TorchState",
    "rank",
    "run",
    "size",
)

P = ParamSpec("P")
R = TypeVar("R")


class HostsUpdatedInterrupt(RuntimeError):
    """The membership has changed: :func:`run` calls the loop again, from the state as it is."""


def rank() -> int:
    """Return this replica's rank in the present generation."""
    return int(current().rank)


def size() -> int:
    """Return the number of replicas of the present generation."""
    return int(current().world_size)


def run(func: Callable[P, R]) -> Callable[P, R]:
    """Decorate a loop whose first argument is a :class:`State`: after a new membership it is called again.

    After a lost member the state is that of the last commit, else as it is; either way the same on all
    ranks, and reset callbacks have run.
    """

    @functools.wraps(func)
    def elastic_loop(*args: P.args, **kwargs: P.kwargs) -> R:
        state = args[0] if args else kwargs.get("state")
        if not isinstance(state, State):
            raise TypeError(
                f"the first argument of {func.__name__}() must be a State, not {state!r:.80}"
            )
        context = current()
        context.join()
        if context.generation == 0:
            # A newcomer's rehearsal, without a group: the loop's own collectives would fail. It ends here.
            context.commit()
        state.reset()
        while True:
            try:
                result = func(*args, **kwargs)
                state.record()
                return result
            except HostsUpdatedInterrupt:
                pass  # the group is the new one already
            except Exception as error:
                context.recover(error)
            state.on_reset()

    return elastic_loop


class State:
    """The state of a loop, which must not be lost. Subclasses say what that is."""

    def __init__(self) -> None:
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Have functions called after each change of membership, as to scale a rate by :func:`size`."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call :meth:`reset`, and what :meth:`register_reset_callbacks` was given."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def reset(self) -> None:
        """Adapt to the new membership, before the callbacks."""

    def record(self) -> None:
        """Bring what samplers have recorded into the ledger: before each commit, and at the end."""

    def commit(self) -> None:
        """Keep the state as it is, and let the membership change. HostsUpdatedInterrupt if it did."""
        self.record()
        if current().commit():
            raise HostsUpdatedInterrupt("the membership has changed")

    def check_host_updates(self) -> None:
        """Let the membership change without a commit. HostsUpdatedInterrupt if it did."""
        if current().check_orders():
            raise HostsUpdatedInterrupt("the membership has changed")


class ObjectState(State):
    """Values and objects by name, read and set as attributes; see ``TrainState``."""

    def __init__(self, **objects: Any) -> None:
        super().__init__()
        self._train_state = current().state(**objects)

    def save(self) -> None:
        """Keep the state as it is, alone: :meth:`commit` does so too."""
        train_state = self._train_state
        train_state.commit(max(train_state.committed_steps, default=0))

    def restore(self) -> None:
        """Go back to the last commit."""
        self._train_state.restore(max(self._train_state.committed_steps))

    def sync(self) -> None:
        """Take over the state of rank 0; all ranks call it."""
        self._train_state.sync()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._train_state, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:
            setattr(self._train_state, name, value)


class TorchState(ObjectState):
    """A model, its optimizer, and other objects and values, any :class:`ElasticSampler` among them.

    The ledger is that of the first sampler that has recorded a batch: the one of the training data.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **objects: Any) -> None:
        given = {"model": model, "optimizer": optimizer, **objects}
        super().__init__(**{name: one for name, one in given.items() if one is not None})
        self._optimizer = optimizer
        self._samplers = [one for one in objects.values() if isinstance(one, ElasticSampler)]

    def record(self) -> None:
        """Bring what the sampler has recorded into the ledger."""
        sampler = next((one for one in self._samplers if one.records), None)
        if sampler is None:
            return
        groups = getattr(self._optimizer, "param_groups", ())
        lr = float(groups[0]["lr"]) if groups else 0.0
        for epoch, first, count, batch in sampler.take_uses():
            current().record_samples(epoch, first, count, sampler.samples, batch, lr)

    def reset(self) -> None:
        """Have samplers share out what is left of the epoch anew."""
        for sampler in self._samplers:
            sampler.reset()


class ElasticSampler(Sampler[int]):
    """A sampler of what is left of an epoch, shared out over the replicas: that of Horovod's elastic API.

    ``record_batch`` after each batch, equal on all ranks; after a change of membership what was recorded is
    not used again. What is recorded between two commits is one entry of the ledger. As in Horovod the last
    samples are filled up with the first, so that all ranks have equally many: of an epoch fewer than
    :func:`size` are used twice, by which its last entry's batch is more than its count. ``ctx.loader`` uses
    each once.
    """

    def __init__(self, dataset: Any, shuffle: bool = True, seed: int = 0) -> None:
        self._length, self._shuffle, self._seed = len(dataset), shuffle, seed
        self.epoch = 0
        self.processed_num = 0
        self.records = False
        """Whether a batch was ever recorded."""
        self._uses: list[tuple[int, int, int, int]] = []
        self._indices: list[int] = []

    @property
    def samples(self) -> int:
        """The samples of an epoch."""
        return self._length

    @property
    def processed_indices(self) -> list[int]:
        """The samples of this epoch that are recorded as used, by all ranks."""
        return [int(one) for one in self._order()[: self.processed_num]]

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; none of its samples is used yet."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that each rank has used a batch of ``batch_size`` samples, number ``batch_idx`` of its own."""
        self._note(batch_size * size())

    def record_indices(self, indices: Collection[int]) -> None:
        """Note that these samples of the dataset were used, by all ranks together: the next of the epoch.

        BadRequestError for others: what is left after a change of membership is the rest of the order.
        """
        given = {int(one) for one in indices}
        first = self.processed_num
        known = set(map(int, self._order()[first : first + len(given)]))
        if given != known:
            raise BadRequestError(
                f"indices are not the next {len(given)} samples of epoch {self.epoch}\n"
                "give those of a batch of all ranks, as record_batch() does by their number",
                field="indices",
            )
        self._note(len(given))

    def _note(self, batch: int) -> None:
        first = min(self.processed_num, self._length)
        self.processed_num += batch
        count = min(batch, self._length - first)
        if count < 1:
            return
        self.records = True
        if self._uses:
            epoch, start, counted, used = self._uses[-1]
            if epoch == self.epoch and start + counted == first:
                self._uses[-1] = epoch, start, counted + count, used + batch
                return
        self._uses.append((self.epoch, first, count, batch))

    def take_uses(self) -> list[tuple[int, int, int, int]]:
        """Return what was recorded since the last time: epoch, first position, count, and with fills."""
        taken, self._uses = self._uses, []
        return taken

    def reset(self) -> None:
        """Share out what is left of the epoch over the present replicas."""
        left = self._order()[self.processed_num :].tolist()
        each = math.ceil(len(left) / size())
        filled = left + (left * size())[: each * size() - len(left)]
        self._indices = filled[rank() :: size()]

    def _order(self) -> Any:
        return epoch_order(self._length, self._seed, self.epoch, self._shuffle)

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, how many of its samples are used, and what is not in the ledger yet."""
        return {
            "epoch": self.epoch,
            "processed_num": self.processed_num,
            "records": self.records,
            "uses": list(self._uses),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where :meth:`state_dict` was called."""
        self.epoch, self.processed_num = state["epoch"], state["processed_num"]
        self.records = state.get("records", False)
        self._uses = [tuple(one) for one in state.get("uses", ())]
        self.reset()

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)
