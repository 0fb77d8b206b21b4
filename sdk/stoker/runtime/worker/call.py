"""A call at its worker, its outcome, and the table of the calls that have not ended.

The loop thread adds calls; the thread that runs them and :class:`~stoker.runtime.worker.execute.CallExecutor`
move them on. A call is in one of ``queued`` and ``running`` until its result is posted, so that the two
together are all for which this worker still answers.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stoker_wire.messages.data import Failed, Result

if TYPE_CHECKING:
    from stoker.exceptions import StokerError
    from stoker_wire.data.channel import Channel
    from stoker_wire.messages.data import Call, Template


class ReceivedCall:
    """One call that this worker was sent."""

    __slots__ = (
        "abandoned",
        "call",
        "channel",
        "running_reported",
        "started_at_s",
        "stop_error",
        "template",
    )

    def __init__(self, channel: Channel, call: Call, template: Template) -> None:
        self.channel = channel
        self.call = call
        self.template = template
        self.started_at_s = 0.0
        self.running_reported = False
        self.abandoned = False
        """Its caller has its error already, though it still runs."""
        self.stop_error: StokerError | None = None
        """Set by a request to stop: the error that it ends with."""


@dataclass(slots=True)
class Outcome:
    """The end of a call, before it is sent. ``contained_refs`` are those inside its results."""

    received: ReceivedCall
    result: Result
    ended_at_s: float
    result_nbytes: int = 0
    contained_refs: tuple[Any, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether it has an error instead of values."""
        returns = self.result.returns
        return bool(returns) and isinstance(returns[0], Failed)


class CallTable:
    """The calls at this worker that have not ended. Any thread may read it."""

    def __init__(self) -> None:
        self.queued: dict[str, ReceivedCall] = {}
        """Popped by whichever comes first: a thread that runs the call, or the loop that returns it."""
        self.running: dict[str, ReceivedCall] = {}
        self.credits: dict[str, int] = {}
        """How many items of each streaming call its caller has taken."""
        self.credit_changed = threading.Condition()

    def get(self, task_id: str) -> ReceivedCall | None:
        """Return a call, whether it runs."""
        return self.queued.get(task_id) or self.running.get(task_id)

    def take(self, received: ReceivedCall) -> bool:
        """Move a call from ``queued`` to ``running``; return False if it is not there any more.

        A later attempt of the same call may be there instead.
        """
        task_id = received.call.task_id
        if self.queued.get(task_id) is not received or self.queued.pop(task_id, None) is None:
            return False
        self.running[task_id] = received
        return True
