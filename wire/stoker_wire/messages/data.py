"""Messages between runtimes on the data path: calls, results, locations of objects, borrows.

Array-like (field names do not travel; new fields only at the end) because these are sent by the hundred
thousand. A frame holds
many of them and, behind its head, the raw buffers that their ``Inline`` values refer to in order.
"""

from __future__ import annotations

import msgspec

from stoker_wire.messages.common import Address


class _Part(msgspec.Struct, array_like=True, gc=False):
    """Root of the parts of a message. Outside the garbage collector: they form no cycles."""


class Ref(_Part):
    """An object's id and the address of its owner."""

    object_id: str
    owner: Address


class Buffer:
    """Raw bytes that travel after a frame's head, which holds only their number."""

    __slots__ = ("view",)

    def __init__(self, view: memoryview | bytes) -> None:
        self.view = view


class Inline(msgspec.Struct, array_like=True, tag=0):
    """A pickled value that travels in the frame, with its out-of-band buffers (pickle protocol 5)."""

    data: bytes
    buffers: tuple[Buffer, ...] = ()
    refs: tuple[Ref, ...] = ()


class Stored(_Part, tag=1):
    """A value in the arena of a node, under the id of its object."""

    nbytes: int
    node_id: str
    node_url: str
    refs: tuple[Ref, ...] = ()
    object_id: str = ""


class Failed(_Part, tag=2):
    """An error in place of a value. ``pickled`` is the user's exception, where it pickles; ``refs`` are
    those inside of it.
    """

    code: str
    message: str
    type_name: str = ""
    traceback: str = ""
    pickled: bytes | None = None
    extra: bytes = b""
    refs: tuple[Ref, ...] = ()


Location = Inline | Stored | Failed


class Dep(_Part):
    """A top-level ref among the arguments, with its value's location as the caller knows it."""

    ref: Ref
    location: Location


class Template(_Part):
    """The common part of many calls of one function; sent once per channel, then named by number."""

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
    """Whether its calls are recorded in the task history."""
    blob: bytes = b""
    """The pickled function if it is small: a worker asks the gcs for others."""
    dynamic: bool = False
    """Whether its one result is a tuple of refs, to all that the function yields."""
    cell: str = ""
    """The notebook's cell that the calls are of: what they print is shown below it."""


class Call(_Part):
    """One attempt of one task, without what its template says."""

    task_id: str
    template: int
    args: Location
    deps: tuple[Dep, ...] = ()
    attempt: int = 0
    submitted_at_s: float = 0.0
    parent_task_id: str = ""
    trace: str = ""
    """The W3C trace context of its caller: traceparent, a space and the tracestate; '' for none. With a +
    before it the caller records a span of the call.
    """


class Hello(_Part, tag=1):
    """First message in each direction: the identity of the sender."""

    peer: Address
    job_id: str
    protocol: tuple[int, int]


class Run(_Part, tag=2):
    """Calls to run, in order; ``templates`` are those that this channel has not carried yet."""

    calls: list[Call]
    templates: list[Template] = []


class Result(_Part):
    """The outcome of an attempt. ``duration_s`` is the user's code alone.

    ``returns`` is one location per return value, or one ``Failed`` for all of them. ``retry`` says
    that the exception is one that the user asked to retry. ``pinned`` asks for a ``Release`` once
    the refs inside the results are borrowed.
    """

    task_id: str
    attempt: int
    returns: tuple[Location, ...]
    duration_s: float = 0.0
    retry: bool = False
    pinned: bool = False
    nitems: int = 0


class Done(_Part, tag=3):
    """Results, many at a time."""

    results: list[Result]


class Returned(_Part, tag=4):
    """Calls that the worker returns without having started them."""

    task_ids: list[str]


class Revoke(_Part, tag=5):
    """Request to return these calls if they have not started."""

    task_ids: list[str]


class Cancel(_Part, tag=6):
    """Request to stop a task: raise in it, or with ``force`` end the worker."""

    task_id: str
    force: bool = False
    recursive: bool = True


class Item(_Part, tag=7):
    """The next value of a streaming generator; ``index`` counts from 0."""

    task_id: str
    attempt: int
    index: int
    location: Location


class Credit(_Part, tag=8):
    """Flow control of a generator: the caller has taken ``consumed`` items, the worker may go on."""

    task_id: str
    consumed: int


class Resolve(_Part, tag=9):
    """Request for the locations of objects, each to be answered as soon as it exists."""

    object_ids: list[str]


class Resolved(_Part, tag=10):
    """Answer to ``Resolve``, one per object."""

    object_id: str
    location: Location


class Borrow(_Part, tag=11):
    """Notice that the sender holds refs to objects of the receiver.

    They are kept until ``ReleaseBorrow`` or the end of the channel.
    """

    number: int
    object_ids: list[str]


class Borrowed(_Part, tag=12):
    """Answer to ``Borrow``; ``gone`` are the objects already freed."""

    number: int
    gone: list[str] = []


class ReleaseBorrow(_Part, tag=13):
    """End of borrows: the sender holds no refs to these objects. Numbered with its ``Borrow`` messages."""

    object_ids: list[str]
    number: int = 0


class Release(_Part, tag=14):
    """Notice that the refs inside the results of these tasks are borrowed: the worker may drop its own."""

    task_ids: list[str]


class Retire(_Part, tag=15):
    """Notice that the worker takes no more calls (``max_calls`` reached): its lease is to be released."""


class Ping(_Part, tag=16):
    """Request for a sign of life, which only a process whose interpreter runs can give."""

    number: int


class Pong(_Part, tag=17):
    """Answer to ``Ping``."""

    number: int


class Recover(_Part, tag=18):
    """Notice to an owner that its object cannot be read on that node. Answered by ``Resolved``."""

    object_id: str
    node_id: str


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
    | Ping
    | Pong
    | Recover
)
