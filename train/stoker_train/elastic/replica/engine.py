"""The life of a replica through generations: join, resize at a boundary, go back after a loss, leave.

The loop's thread runs it, below the context that the user sees. It reports to the controller and obeys it:
which ranks are in a generation is decided there. Everything here that waits for other ranks ends in a
bounded time, or when the controller says that they will not come.
"""

from __future__ import annotations

import gc
import logging
import os
import platform
import time
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import stoker
from stoker.exceptions import ConflictError, StokerError
from stoker_train.elastic.core import events as ev
from stoker_train.elastic.core.membership import (
    Membership,
    Order,
    Resize,
    Restore,
    Stop,
    Suspend,
)
from stoker_train.elastic.replica import group
from stoker_train.elastic.replica.reports import Paused, Saved
from stoker_train.elastic.replica.settings import Fence
from stoker_train.elastic.state.checkpoints import CheckpointStore
from stoker_train.elastic.sync.residuals import heirs

if TYPE_CHECKING:
    from stoker_train.elastic.options import Checkpoint, Failure
    from stoker_train.elastic.replica.link import Link
    from stoker_train.elastic.state.train_state import TrainState

__all__ = ("Engine", "LeaveTraining", "MemberLostError", "StopTraining")

_log = logging.getLogger(__name__)
_LOOK_S = 1.0
_SAVE_S = 600.0


class MemberLostError(StokerError):
    """A rank of the generation is gone, or does not answer: the group is broken."""


class LeaveTraining(BaseException):
    """Raised in a loop whose replica is no longer in the training; no loop should catch it."""


class StopTraining(BaseException):
    """Raised in a loop that has no end of its own to be stopped at; no loop should catch it."""


class Engine:
    """The generation that this replica is in, and the ways to the next.

    ``parts`` is what has to be done with the training's own parts: see :class:`Parts`.
    """

    def __init__(
        self,
        link: Link,
        device: torch.device,
        failure: Failure,
        checkpoint: Checkpoint,
        *,
        code: str,
        seed: int,
    ) -> None:
        self.link, self.device, self.failure = link, device, failure
        self.membership: Membership | None = None
        self.rank = 0
        self.seed, self.code = seed, code
        self.store = CheckpointStore(checkpoint.path or "runs/elastic", checkpoint.keep)
        self.state: TrainState | None = None
        self.open_group: Callable[[], None] = lambda: None
        """Makes what needs the new group: gradient exchange, strategy."""
        self.close_group: Callable[[], None] = lambda: None
        self.after_join: Callable[[], None] = lambda: None
        self.settle: Callable[[], None] = lambda: None
        self.hand_on: Callable[[Mapping[int, int]], None] = lambda heirs: None
        """Has ranks that leave give what is theirs alone to others, by their ranks."""
        self.limit_local: Callable[[int], None] = lambda local: None
        """Lowers the samples of a pass."""
        self.step_number: Callable[[], int] = lambda: 0
        self.due = 0
        """The newest order that all ranks know."""
        self.done = 0
        """The newest order that was applied here."""
        self.pending_mean: tuple[int, float, float] | None = None
        self.means_done: dict[int, float] = {}
        self.resolved_means: dict[int, float] = {}
        self.durable_step: int | None = None
        self.fence = Fence()

    @property
    def generation(self) -> int:
        """The number of the present generation; 0 before the first."""
        return self.membership.generation if self.membership is not None else 0

    @property
    def world_size(self) -> int:
        """The ranks of the present generation."""
        return self.membership.world_size if self.membership is not None else 1

    @property
    def joined(self) -> bool:
        """Whether it is in a generation."""
        return self.membership is not None

    # Into a generation.

    def join(self) -> None:
        """Report that this replica is ready, and wait until it is taken into a generation."""
        if self.state is not None:
            self.state.warm()  # before others wait for it
        context = stoker.get_runtime_context()
        self.link.report(
            ev.Ready(
                0.0,
                self.link.worker,
                context.get_actor_id() or "",
                context.get_node_id(),
                self.code,
            ),
            urgent=True,
        )
        self._wait_and_form(0, began=None, kind="")

    def _wait_and_form(self, after: int, *, began: float | None, kind: str) -> None:
        """Form the next generation that the controller orders; tries again if that one breaks, too."""
        while True:
            form = self.link.wait_form(after, _LOOK_S)
            if form is None:  # a replica ends with its controller, which owns it
                continue
            after = form.membership.generation
            rank = form.membership.rank_of(self.link.worker)
            if rank is None:
                raise LeaveTraining("this replica is not in the next generation")
            try:
                self._form(
                    form.membership, rank, form.restore, form.after_order, began, kind or "start"
                )
                return
            except LeaveTraining:
                raise
            except ConflictError as error:
                if "cannot be synced" in str(error):
                    raise
                self._broken(error, after)
            except Exception as error:
                self._broken(error, after)

    def _form(
        self,
        membership: Membership,
        rank: int,
        restore: Restore,
        after_order: int,
        began: float | None,
        kind: str,
    ) -> None:
        before = self.world_size if self.joined else 0
        self.link.report(ev.Joining(0.0, self.link.worker, membership.generation), urgent=True)
        group.form(membership, rank, self.device, self.failure, self.link.abandoned)
        was_in = self.joined or bool(self._commits())
        self.membership, self.rank = membership, rank
        lacks = not was_in if restore.step is None else restore.step not in self._commits()
        needs_sync = self._handshake(lacks=lacks or restore.durable)
        if self.state is not None:
            self._bring_state(
                restore,
                newcomer=not was_in,
                needs_sync=needs_sync,
                lacks=lacks or restore.durable,
            )
        if restore.local is not None:
            self.limit_local(restore.local)
        self.open_group()
        # Orders of the generation before are void: what they changed is in the state.
        self.link.begin_orders(after_order)
        self.due = self.done = after_order
        if self.state is not None and not self.state.committed_steps:
            self.state.commit(self.step_number())
        pause_s = 0.0 if began is None else time.monotonic() - began
        step = self.step_number()
        self.link.report(ev.Formed(0.0, self.link.worker, membership.generation, step), urgent=True)
        if began is not None:
            self.link.report(
                Paused(
                    self.link.worker,
                    membership.generation,
                    kind,
                    pause_s,
                    step,
                    before,
                    membership.world_size,
                )
            )
        self.after_join()
        if self.state is not None:
            self.state.run_reset_callbacks()
            if restore.step is not None:
                self.save()  # of what a lost rank 0 may still write, none counts from here on

    def _handshake(self, *, lacks: bool) -> bool:
        """Settle what ranks were at when the last group broke: means that some have, and others not.

        Returns whether some rank has not the state with which the generation begins.
        """
        said: list[Any] = [None] * self.world_size
        means = dict(list(self.means_done.items())[-2:])
        mine = (self.code, self.pending_mean, means, lacks)
        if self.world_size > 1:
            dist.all_gather_object(said, mine)
        else:
            said = [mine]
        codes = {one[0] for one in said}
        if len(codes) > 1:
            raise ConflictError("the ranks have several versions of the code\ninstall the same one")
        if self.pending_mean is not None:
            number = self.pending_mean[0]
            known = [one[2][number] for one in said if number in one[2]]
            parts = [one[1] for one in said if one[1] is not None and one[1][0] == number]
            weight = sum(one[2] for one in parts)
            mean = sum(one[1] for one in parts) / weight if weight else float("nan")
            self.resolved_means[number] = known[0] if known else mean
        return any(one[3] for one in said)

    def _bring_state(
        self, restore: Restore, *, newcomer: bool, needs_sync: bool, lacks: bool
    ) -> None:
        state = self.state
        assert state is not None
        if restore.step is not None and restore.step in state.committed_steps:
            state.restore(restore.step)
        found = self._load_durable(state) if restore.durable else None
        if needs_sync and self.world_size > 1:
            if self.rank == 0:
                state.commit(self.step_number())  # what ranks on this machine read
            state.sync(None, 0, step=self.step_number(), needed=lacks)
        has_own = found is not None and self._load_own(state, *found)
        if newcomer and not has_own and (self.generation > 1 or self.rank > 0):
            state.random.seed(self.seed, self.generation, self.rank)

    def _load_durable(self, state: TrainState) -> tuple[int, int] | None:
        """Have rank 0 load the newest checkpoint; returns its step and fence on all ranks, None for none."""
        said: list[Any] = [None]
        if self.rank == 0:
            found = self.store.latest()
            if found is None:
                state.begin_anew()
            else:
                state.load_state_dict(found[1])
                fence = self.store.generation_of(found[0])
                self.fence.passes(fence, self.generation)
                said = [(found[0], fence)]
        if self.world_size > 1:
            dist.broadcast_object_list(said, 0)
        if said[0] is None:
            return None
        self.durable_step, fence = said[0]
        return said[0][0], fence

    def _load_own(self, state: TrainState, step: int, fence: int) -> bool:
        """Load what a checkpoint has of this rank alone; False if it has nothing."""
        if self.rank == 0:  # it was in what all share
            return True
        payload = self.store.load(step, self.rank, generation=fence)
        if payload is not None:
            state.load_own(payload)
        return payload is not None

    # At a boundary.

    def boundary(self) -> bool:
        """Agree with all ranks on the newest order that every one of them knows; a collective."""
        if self.world_size == 1:
            self.agree(self.link.known_order)
        else:
            known = torch.tensor([self.link.known_order], dtype=torch.int64)
            self.waits(lambda: dist.all_reduce(known, dist.ReduceOp.MIN))
            self.agree(int(known))
        return self.resize_is_due

    def agree(self, known: int) -> None:
        """Note the newest order that all ranks know."""
        self.due = max(self.due, known)

    @property
    def resize_is_due(self) -> bool:
        """Whether an order that changes the membership is to be applied."""
        return any(isinstance(one.action, Resize | Suspend) for one in self._peek())

    def _peek(self) -> list[Order]:
        return [
            one
            for n, one in sorted(self.link.waiting_orders().items())
            if self.done < n <= self.due and one.generation == self.generation
        ]

    def take_orders(self) -> list[Order]:
        """Return the orders that are due now, in their order, and count them as done."""
        if self.due <= self.done:
            return []
        orders = self.link.orders(self.due, self.done)
        self.done = self.due
        return [one for one in orders if one.generation == self.generation]

    def resize(self, order: Order) -> None:
        """Leave the present generation and form the next, at the boundary that all ranks are at."""
        began = time.monotonic()
        action = order.action
        assert isinstance(action, Resize)
        self.settle()
        self.hand_on(self._heirs(action.membership))
        self._leave_group()
        rank = action.membership.rank_of(self.link.worker)
        if rank is None:
            self.link.report(
                ev.Left(0.0, self.link.worker, action.membership.generation), urgent=True
            )
            raise LeaveTraining("the job has become smaller")
        try:
            self._form(action.membership, rank, Restore(), order.number, began, "memory")
        except LeaveTraining:
            raise
        except Exception as error:
            if isinstance(error, ConflictError) and "cannot be synced" in str(error):
                raise
            self._broken(error, action.membership.generation)
            self._wait_and_form(action.membership.generation, began=began, kind="restore")

    def _heirs(self, next_one: Membership) -> dict[int, int]:
        """Return to whom each rank hands on that is not in the next membership."""
        assert self.membership is not None
        members = self.membership.members
        stay = {one.rank for one in members if next_one.rank_of(one.incarnation) is not None}
        return heirs(len(members), stay)

    def suspend(self) -> None:
        """Save a durable checkpoint and leave: all ranks, at one boundary."""
        self.settle()
        self.save(wait=True)
        self._leave_group()
        self.link.report(ev.Left(0.0, self.link.worker, self.generation), urgent=True)
        raise LeaveTraining("the job goes on from its checkpoint")

    def save(self, *, wait: bool = False) -> None:
        """Write a durable checkpoint of this step, beside the training unless ``wait``.

        On all ranks: rank 0 writes what they share, each other one what is its own.
        """
        if self.state is None:
            return
        step, state = self.step_number(), self.state
        if step not in state.committed_steps:
            state.commit(step)
        generation, rank = self.generation, self.rank
        held = state.committed if rank == 0 else state.committed_own
        future = self.store.save(
            step, lambda: held(step), rank=rank, generation=self.fence.of(generation)
        )

        def saved(done: Any) -> None:
            one = done.result()
            path = "" if one.path is None else str(one.path)
            self.link.report(
                Saved(self.link.worker, generation, one.step, path, one.problem), urgent=True
            )

        if rank == 0:
            future.add_done_callback(saved)
        if wait:
            future.result(timeout=_SAVE_S)

    # After a loss.

    def check_lives(self) -> None:
        """Raise MemberLostError if the controller has given up this generation."""
        if self.link.is_void(self.generation):
            raise MemberLostError(f"generation {self.generation} was given up by the controller")

    def waits(self, collective: Callable[[], Any]) -> Any:
        """Do a collective, of which the controller can see that this rank waits for others.

        MemberLostError if the group is broken, with nothing of torch in it: a traceback would hold the group,
        whose connections then stayed open, and ranks that wait for this one would go on waiting.
        """
        self.link.begin_wait(self.generation, self.step_number())
        try:
            return collective()
        except Exception as error:
            if not self.is_loss(error):
                raise
            text = str(error).partition("\n")[0]
            _forget_frames(error)
        finally:
            self.link.end_wait()
        raise MemberLostError(f"generation {self.generation} lost a rank\n{text}")

    def recover(self, error: BaseException) -> None:
        """Leave the broken group, and form the generation that the controller makes of the survivors."""
        began = time.monotonic()
        generation = self.generation
        self.close_group()
        self._broken(error, generation)
        self._wait_and_form(generation, began=began, kind="restore")

    def _broken(self, error: BaseException, generation: int) -> None:
        why = f"{type(error).__name__}: {error}"
        _forget_frames(error)
        self._leave_group(broken=True)
        gc.collect()
        _log.info("generation %d is broken: %s", generation, why)
        self.link.report(
            ev.Broken(
                0.0, self.link.worker, generation, self.step_number(), self._commits(), why[:2000]
            ),
            urgent=True,
        )

    def _commits(self) -> tuple[int, ...]:
        return self.state.committed_steps if self.state is not None else ()

    def _leave_group(self, *, broken: bool = False) -> None:
        self.close_group()
        group.leave(broken=broken)

    def is_loss(self, error: BaseException) -> bool:
        """Return whether an error of a collective is the loss of a rank, not a mistake of the loop."""
        if isinstance(error, MemberLostError | dist.DistError):
            return True
        text = str(error)
        return isinstance(error, RuntimeError) and any(sign in text for sign in _SIGNS)


def _forget_frames(error: BaseException | None) -> None:
    """Let go of all that the frames of an error and its causes hold."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


_SIGNS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "gloo",
    "Timed out",
    "timed out",
    "NCCL",
    "Socket",
    "process group",
)


def code_version(loop: Any, pickled: bytes) -> str:
    """Return what tells one version of the job's code from another: loop, its file, Python and torch."""
    import inspect

    import xxhash

    digest = xxhash.xxh3_64(pickled)
    try:
        path = inspect.getsourcefile(loop)
        if path and os.path.exists(path):
            with open(path, "rb") as file:
                digest.update(file.read())
    except TypeError:
        pass
    return f"{digest.hexdigest()} torch {torch.__version__} python {platform.python_version()}"


def stop_reason(orders: list[Order]) -> str | None:
    """Return why a Stop among the orders was given; None if there is none."""
    return next((one.action.reason for one in orders if isinstance(one.action, Stop)), None)
