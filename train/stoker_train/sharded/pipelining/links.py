"""Messages between the ranks of a pipeline: point to point, each with a deadline that says what it was.

Called by the executor and by :mod:`.tied`, in one thread, in the order of :mod:`.timeline`. On CPUs a wait
blocks until its deadline. On GPUs a wait orders streams, so that the host runs ahead; there ``finish`` waits
for all messages of the step, and names the first that did not come.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from stoker.exceptions import DeadlineExceededError, StokerError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

_POLL_S = 0.0005
_MOST_SENDS = 8
"""Under way at most from a CPU, where only a wait tells that one has left and its memory can go."""
T = TypeVar("T")


@dataclass(slots=True)
class Sent:
    """The messages (tensors) that a rank has sent to others, and their bytes; forms of messages count too."""

    messages: int = 0
    nbytes: int = 0


@dataclass(slots=True)
class Pending:
    """A message under way; ``tensor`` is kept, or filled, until it has arrived."""

    work: dist.Work
    tensor: torch.Tensor
    what: str


class Links:
    """The lines of this rank to the others of its pipeline, numbered as in ``group``."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout_s: float) -> None:
        self.group, self.device, self.timeout_s = group, device, timeout_s
        self.rank = dist.get_rank(group)
        self.sent = Sent()
        self._sends: list[Pending] = []
        self._received: list[Pending] = []

    def send(self, tensor: torch.Tensor, peer: int, tag: int, what: str) -> None:
        """Begin to send; ``what`` says what, for the error."""
        tensor = tensor.detach().contiguous()
        what = f"send {what} to rank {peer} of the pipeline"
        work = self._begin(
            lambda: dist.isend(tensor, group=self.group, group_dst=peer, tag=tag), what
        )
        self.sent.messages += 1
        self.sent.nbytes += tensor.nbytes
        self._sends.append(Pending(work, tensor, what))
        if self.device.type == "cpu":
            while len(self._sends) > _MOST_SENDS:
                self.wait(self._sends.pop(0))
        else:
            _drop_done(self._sends)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int, what: str) -> Pending:
        """Begin to receive into ``tensor``."""
        what = f"receive {what} from rank {peer} of the pipeline"
        work = self._begin(
            lambda: dist.irecv(tensor, group=self.group, group_src=peer, tag=tag), what
        )
        return Pending(work, tensor, what)

    def wait(self, pending: Pending) -> torch.Tensor:
        """Wait for a message; its tensor can be used then. Raises DeadlineExceededError, UnavailableError."""
        if self.device.type != "cpu":
            self._begin(pending.work.wait, pending.what)
            self._received.append(pending)
            _drop_done(self._received)
            return pending.tensor
        began = time.monotonic()
        try:
            pending.work.wait(timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            late = time.monotonic() - began >= self.timeout_s
            raise (self._late if late else self._broken)(pending.what, error) from error
        return pending.tensor

    def finish(self) -> None:
        """Wait until all that was sent has left, and on GPUs until all that was received is there."""
        if self.device.type == "cpu":
            while self._sends:
                self.wait(self._sends.pop(0))
            return
        deadline = time.monotonic() + self.timeout_s
        for pending in (*self._received, *self._sends):
            while not self._begin(pending.work.is_completed, pending.what):
                if time.monotonic() > deadline:
                    raise self._late(pending.what, None)
                time.sleep(_POLL_S)
        self._received.clear()
        self._sends.clear()

    def share(self, tensor: torch.Tensor, source: int, what: str) -> None:
        """Give all ranks of the pipeline the tensor of rank ``source``, in place."""
        what = f"get {what} from rank {source} of the pipeline"
        work = self._begin(
            lambda: dist.broadcast(tensor, group=self.group, group_src=source, async_op=True), what
        )
        self.wait(Pending(work, tensor, what))

    def average(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Make the mean of a tensor over another group, in place."""
        what = "add up the loss with the other pipelines"
        work = self._begin(lambda: dist.all_reduce(tensor, group=group, async_op=True), what)
        self.wait(Pending(work, tensor, what))
        tensor /= group.size()

    def _begin(self, call: Callable[[], T | None], what: str) -> T:
        try:
            found = call()
        except RuntimeError as error:
            raise self._broken(what, error) from error
        assert found is not None, "this rank is not of the group"
        return found

    def _late(self, what: str, error: RuntimeError | None) -> StokerError:
        cause = f"\n{error}" if error is not None else ""
        return DeadlineExceededError(
            f"rank {self.rank} of the pipeline waited {self.timeout_s:g} s to {what}\n"
            "that rank is slow, stuck or gone, or has a batch of another shape: see its output, or give a "
            f"larger timeout_s{cause}"
        )

    def _broken(self, what: str, error: RuntimeError) -> StokerError:
        return UnavailableError(
            f"rank {self.rank} of the pipeline could not {what}\nthat rank is gone: see its output\n{error}"
        )


def _drop_done(pending: list[Pending]) -> None:
    """Let go of the memory of what has arrived."""
    while pending and pending[0].work.is_completed():
        pending.pop(0)
