"""What runtimes say to each other on the data path: calls, results, and questions about objects.

Array-like (field names do not travel) because these are sent by the hundred thousand. A frame holds
many of them and, behind its head, the raw buffers that their ``Inline`` values refer to in order.
"""

from __future__ import annotations

import msgspec

from stoker_wire.messages.common import Address


class _Part(msgspec.Struct, array_like=True, gc=False):
    """Root of the parts of a message. Outside the garbage collector: they form no cycles."""


class Ref(_Part):
    """Names an object and where its owner listens."""

    object_id: str
    owner: Address


class Buffer:
    """Raw bytes that travel behind a frame's head; in the head only their number appears."""

    __slots__ = ("view",)

    def __init__(self, view: memoryview | bytes) -> None:
        self.view = view


class Inline(msgspec.Struct, array_like=True, tag=0):
    """A pickled value that travels in the frame, with its out-of-band buffers (pickle protocol 5)."""

    data: bytes
    buffers: tuple[Buffer, ...] = ()
    refs: tuple[Ref, ...] = ()


class Stored(_Part, tag=1):
    """A value that lies in the arena of a node, under the id of its object."""

    nbytes: int
    node_id: str
    node_url: str
    refs: tuple[Ref, ...] = ()
    object_id: str = ""


class Failed(_Part, tag=2):
    """Instead of a value: what went wrong. ``pickled`` is the user's exception, where it pickles;
    ``refs`` are those inside of it.
    """

    code: str
    message: str
    type_name: str = ""
    traceback: str = ""
    pickled: bytes | None = None
    extra: bytes = b""
    refs: tuple[Ref, ...] = ()


Place = Inline | Stored | Failed


class Dep(_Part):
    """A top-level ref among the arguments, with its value's place as the caller knows it."""

    ref: Ref
    place: Place


class Template(_Part):
    """What many calls of one function share; sent once per connection, then named by number."""

    number: int
    function: str
    """Hash of the pickled function, or the method's name for an actor."""
    name: str
    num_returns: int = 1
    streaming: bool = False
    timeout_s: float = 0.0
    max_calls: int = 0
    group: str = ""
    retry_exceptions: bytes = b""
    history: bool = True
    """Whether the task history keeps its calls."""


class Call(_Part):
    """One attempt of one task: what differs from its template."""

    task_id: str
    template: int
    args: Place
    deps: tuple[Dep, ...] = ()
    attempt: int = 0
    submitted_at_s: float = 0.0
    parent_task_id: str = ""


class Hello(_Part, tag=1):
    """First message in each direction: who speaks."""

    peer: Address
    job_id: str
    protocol: tuple[int, int]


class Run(_Part, tag=2):
    """Run these, in order; ``templates`` are those that this connection has not carried yet."""

    calls: list[Call]
    templates: list[Template] = []


class Result(_Part):
    """How an attempt ended. ``duration_s`` is the user's code alone.

    ``returns`` is one place per return value, or one ``Failed`` for all of them. ``retry`` says
    that the exception is one that the user asked to retry. ``escaped`` asks for a ``Release`` once
    the refs inside the results are borrowed.
    """

    task_id: str
    attempt: int
    returns: tuple[Place, ...]
    duration_s: float = 0.0
    retry: bool = False
    escaped: bool = False
    nitems: int = 0


class Done(_Part, tag=3):
    """Results, many at a time."""

    results: list[Result]


class Returned(_Part, tag=4):
    """Calls that the worker gives back without having started them."""

    task_ids: list[str]


class Revoke(_Part, tag=5):
    """Give these back if they have not started."""

    task_ids: list[str]


class Cancel(_Part, tag=6):
    """Stop a task: raise in it, or with ``force`` end the worker."""

    task_id: str
    force: bool = False
    recursive: bool = True


class Item(_Part, tag=7):
    """The next value of a streaming generator; ``index`` counts from 0."""

    task_id: str
    attempt: int
    index: int
    place: Place


class Credit(_Part, tag=8):
    """The caller has taken ``consumed`` items of a generator: the worker may run further ahead."""

    task_id: str
    consumed: int


class Resolve(_Part, tag=9):
    """Tell me where these are, each as soon as it is there."""

    object_ids: list[str]


class Resolved(_Part, tag=10):
    """Answer to ``Resolve``, one per object."""

    object_id: str
    place: Place


class Borrow(_Part, tag=11):
    """I hold refs to these objects of yours; keep them until ``ReleaseBorrow`` or the end of the line."""

    number: int
    object_ids: list[str]


class Borrowed(_Part, tag=12):
    """Answer to ``Borrow``; ``gone`` are those already freed."""

    number: int
    gone: list[str] = []


class ReleaseBorrow(_Part, tag=13):
    """I no longer hold refs to these. Numbered with the ``Borrow`` messages of the same sender."""

    object_ids: list[str]
    number: int = 0


class Release(_Part, tag=14):
    """The refs inside the results of these tasks are borrowed: no need to hold them for me."""

    task_ids: list[str]


class Retire(_Part, tag=15):
    """The worker will take no more calls (``max_calls`` reached): give its lease back."""


DataMessage = (
    Hello
    | Run
    | Done
    | Returned
    | Revoke
    | Cancel
    | Item
    | Credit
    | Resolve
    | Resolved
    | Borrow
    | Borrowed
    | ReleaseBorrow
    | Release
    | Retire
)
