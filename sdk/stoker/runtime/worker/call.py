"""A call at its worker: as it came, how it ended, and the table of all that have not ended."""

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
    """One call at this worker."""

    __slots__ = ("answered", "call", "channel", "interrupt", "reported", "started_at_s", "template")

    def __init__(self, channel: Channel, call: Call, template: Template) -> None:
        self.channel = channel
        self.call = call
        self.template = template
        self.started_at_s = 0.0
        self.reported = False
        self.answered = False
        """Its caller was told how it ends, though it still runs."""
        self.interrupt: StokerError | None = None
        """Set once the task was told to stop: the error that it ends with."""


@dataclass(slots=True)
class Outcome:
    """How a call ended, before it is sent. ``contained`` are refs inside its results."""

    work: ReceivedCall
    result: Result
    ended_at_s: float
    result_nbytes: int = 0
    contained: tuple[Any, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether it has an error instead of values."""
        returns = self.result.returns
        return bool(returns) and isinstance(returns[0], Failed)


class CallTable:
    """The calls at this worker that have not ended. Read by any thread."""

    def __init__(self) -> None:
        self.queued: dict[str, ReceivedCall] = {}
        """Popped by whoever gets there first: the main thread to run, the loop to give back."""
        self.running: dict[str, ReceivedCall] = {}
        self.credits: dict[str, int] = {}
        """How many items of each streaming call its caller has taken."""
        self.credit_changed = threading.Condition()
