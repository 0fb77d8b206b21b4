"""A call as its owner sees it: its function, its packed arguments, its state until it is settled."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Hashable, Iterable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from stoker.exceptions import StokerError, TaskCancelledError, TaskTimeoutError
from stoker.runtime.objects.refs import ObjectRef, wire_ref
from stoker.runtime.objects.table import Entry
from stoker.runtime.serialization.pickling import OUT_OF_BAND_MIN_NBYTES, LargeBytes, pack
from stoker.runtime.tasks.dispatch import ClassQueue, Slot
from stoker.runtime.tasks.functions import TEMPLATE_NUMBERS
from stoker.runtime.tasks.streams import ItemSink
from stoker_wire.data.channel import Channel
from stoker_wire.ids import return_id
from stoker_wire.messages.data import (
    Buffer,
    Call,
    Dep,
    Failed,
    Inline,
    Location,
    Run,
    Stored,
    Template,
)

if TYPE_CHECKING:
    from stoker.runtime.objects.values import ValueStore
    from stoker.runtime.options.options import TaskOptions
    from stoker_wire.messages.cluster import Demand
    from stoker_wire.messages.common import Address

FRAME_MAX_BYTES = 256 << 10
"""Larger arguments go through shared memory instead of the frame."""

MAX_LEASES = 1 << 30
"""Of functions without a bound of their own."""

TEMPLATES = 1000
"""How many templates a caller assumes to be known at the far end, which keeps as many: the last ones."""

_CELLS = 100
_SMOOTHING = 0.2
MAX_BACKOFF_S = 300.0
"""The longest pause before a retry, unless ``retry_delay`` itself is longer."""
OOM_DELAY_S = 1.0
"""The first pause after a worker that had no memory left: others need time to give some back."""
_DOUBLINGS = 40
_JITTER = 0.25
_NO_ARGUMENTS = Inline(pack(((), {}, ()), what="").data)


class Phase(IntEnum):
    """The state of a task, as its owner sees it."""

    NEW = 0
    WAITING = 1
    """For arguments, or for the delay before a retry."""
    REGISTERING = 2
    QUEUED = 3
    SENT = 4
    ENDED = 5


def backoff_s(delay_s: float, attempt: int) -> float:
    """Return the pause before an attempt (1 is the first retry): twice as long each time, within a quarter.

    The chance in it keeps calls that failed together from coming back together.
    """
    whole_s = min(
        delay_s * 2.0 ** min(max(attempt, 1) - 1, _DOUBLINGS), max(delay_s, MAX_BACKOFF_S)
    )
    return whole_s * random.uniform(1 - _JITTER, 1 + _JITTER)


class Submitter(Protocol):
    """The part that sends the calls of a function, and knows why they wait."""

    def describe(self, task: PendingTask) -> str:
        """Return what a call waits for, in words."""

    def cancel(self, task: PendingTask, *, force: bool, recursive: bool) -> None:
        """Stop a call (loop thread): drop it if it waits, tell its worker if it runs."""


class Share(msgspec.Struct, frozen=True):
    """The leases of some functions alone (a pool's): at most so many at once, whatever waits."""

    number: int
    max_leases: int


class FunctionSpec:
    """A remote function with one set of options, shared by all its calls."""

    def __init__(
        self,
        *,
        submitter: Submitter,
        function: str,
        blob: bytes,
        name: str,
        template: Template,
        options: TaskOptions,
        demand: Demand,
        actor_id: str = "",
        refs: Sequence[ObjectRef[Any]] = (),
    ) -> None:
        self.submitter = submitter
        self.function = function
        self.blob = blob
        self.name = name
        self.template = template
        self.options = options
        self.demand = demand
        # The name is for people: functions with equal needs share their leases.
        self.demand_key = msgspec.msgpack.encode(msgspec.structs.replace(demand, name=""))
        self.max_leases = MAX_LEASES
        self.actor_id = actor_id
        self.refs = refs
        """Refs that the function closes over: kept alive while calls of it are unsettled."""
        self.mean_s: float | None = None
        """How long its calls take: a moving mean of the workers' measurements."""
        self.registered = False
        self.storing_error = ""
        """Why the gcs does not take the function, while it does not."""
        self.awaiting_registration: list[PendingTask] = []
        self._in_cells: dict[str, FunctionSpec] = {}
        self._in_last_cell: FunctionSpec | None = None

    def in_cell(self, cell: str) -> FunctionSpec:
        """Return this function for calls of a notebook's cell, as the last cell left it."""
        spec = self._in_cells.get(cell)
        if spec is None and cell:
            spec = self._in_last_cell = copy.copy(self._in_last_cell or self)
            number = next(TEMPLATE_NUMBERS)
            spec.template = msgspec.structs.replace(self.template, number=number, cell=cell)
            spec.awaiting_registration, spec._in_cells, spec._in_last_cell = [], {}, None
            while len(self._in_cells) >= _CELLS:
                self._in_cells.pop(next(iter(self._in_cells)), None)
            self._in_cells[cell] = spec
        return spec or self

    def take_share(self, share: Share) -> None:
        """Have leases that only the functions of the same share use (before the first call)."""
        self.demand_key += msgspec.msgpack.encode(share)
        self.max_leases = share.max_leases


class PendingTask(msgspec.Struct, eq=False, gc=False):
    """A task or actor call of this process until it is settled. ``deps`` and ``nested`` keep refs alive.

    There may be a million of them, so the garbage collector does not visit them; the cycle with their
    entries ends when they are settled.
    """

    task_id: str
    spec: FunctionSpec
    args: Location
    deps: Sequence[ObjectRef[Any]]
    nested: Sequence[ObjectRef[Any]]
    parent_task_id: str
    fairness_key: Hashable = None
    """Its function and the thread that called it: keys take turns."""
    phase: Phase = Phase.NEW
    entries: Sequence[Entry] = ()
    stream: ItemSink | None = None
    queue: ClassQueue[PendingTask] | None = None
    slot: Slot[PendingTask] | None = None
    channel: Channel | None = None
    attempt: int = 0
    retries_left: int = 0
    oom_retries_left: int = 0
    retry_at_s: float = 0.0
    """When its next attempt may begin, by the clock of the loop; 0 if it need not wait."""
    submitted_at_s: float = 0.0
    cancelled: bool = False
    isolate: bool = False
    """Whether it was among several calls at a worker that died, and may have ended it."""
    waiting_deps: int = 0
    trace: str = ""
    """The trace context that it carries."""

    def __post_init__(self) -> None:
        options = self.spec.options
        self.retries_left = options.max_retries
        self.oom_retries_left = options.oom_retries
        self.submitted_at_s = time.time()

    @property
    def name(self) -> str:
        """The call's name for people."""
        return self.spec.name

    def describe(self) -> str:
        """Return what the call waits for, in words."""
        return self.spec.submitter.describe(self)

    @property
    def exclusive(self) -> bool:
        """Whether it is sent only to a worker without other calls, so that a death has one cause.

        A call that must not run twice is: no result of a call before it can be lost with it.
        """
        return self.isolate or self.spec.options.max_retries == 0

    @property
    def group(self) -> str:
        """The concurrency group of an actor's call, or ''."""
        return self.spec.template.group

    @property
    def expected_s(self) -> float | None:
        """The mean time that calls of its function take, if any came back."""
        return self.spec.mean_s

    def record_duration(self, duration_s: float) -> None:
        """Update the mean length with that of a call that came back."""
        spec = self.spec
        mean_s = spec.mean_s
        spec.mean_s = duration_s if mean_s is None else mean_s + _SMOOTHING * (duration_s - mean_s)

    def take_retry(self, *, oom: bool = False) -> bool:
        """Use up one retry; return False if none was left (-1 means without limit).

        Those after a worker that had no memory left (``oom``) are counted apart.
        """
        left = self.oom_retries_left if oom else self.retries_left
        if left == 0:
            return False
        if oom:
            self.oom_retries_left = left - 1 if left > 0 else left
        else:
            self.retries_left = left - 1 if left > 0 else left
        self.attempt += 1
        return True

    def describe_retry(self, now_s: float) -> str:
        """Return when and as which attempt it goes on, in words."""
        left = self.retries_left
        of = "" if left < 0 else f" of at most {self.attempt + 1 + left}"
        when = f" in {self.retry_at_s - now_s:.1f} s" if self.retry_at_s > now_s else ""
        return f"its attempt {self.attempt + 1}{of} begins{when}"


def pack_arguments(
    values: ValueStore,
    address: Address,
    task_id: str,
    spec: FunctionSpec,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> tuple[Location, Sequence[ObjectRef[Any]], Sequence[ObjectRef[Any]]]:
    """Return (packed arguments, top-level refs in order, refs nested inside values).

    The pickle is of ``(args, kwargs, where)``; ``where`` lists the position or name of each top-level ref,
    in the order of the call's ``deps``.
    """
    if not args and not kwargs:
        return _NO_ARGUMENTS, (), ()
    deps: list[ObjectRef[Any]] = []
    where: list[int | str] = []
    plain = list(args)
    for index, value in enumerate(args):
        if isinstance(value, ObjectRef):
            deps.append(value)
            where.append(index)
            plain[index] = None
        elif type(value) is bytes and len(value) >= OUT_OF_BAND_MIN_NBYTES:
            plain[index] = LargeBytes(value)
    if kwargs:
        for name, value in kwargs.items():
            if isinstance(value, ObjectRef):
                deps.append(value)
                where.append(name)
                kwargs = {**kwargs, name: None}
            elif type(value) is bytes and len(value) >= OUT_OF_BAND_MIN_NBYTES:
                kwargs = {**kwargs, name: LargeBytes(value)}
    packed = pack((plain, kwargs, where), what=f"arguments of {spec.name}")
    refs = tuple(wire_ref(ref, address) for ref in packed.refs)
    if packed.nbytes > FRAME_MAX_BYTES and values.arena is not None:
        location = values.store(return_id(task_id, "args"), packed)
    else:
        # The user may change an array after the call, before it is sent: hence the copies.
        location = Inline(packed.data, tuple(Buffer(bytes(v)) for v in packed.buffers), refs)
    return location, deps, packed.refs


def wire_call(task: PendingTask, address: Address) -> Call:
    """Return the message form of a task."""
    deps: tuple[Dep, ...] = ()
    if task.deps:
        deps = tuple(_dep(ref, address) for ref in task.deps)
    return Call(
        task.task_id,
        task.spec.template.number,
        task.args,
        deps,
        task.attempt,
        task.submitted_at_s,
        task.parent_task_id,
        task.trace,
    )


def _dep(ref: ObjectRef[Any], address: Address) -> Dep:
    location = ref._entry.location
    assert location is not None
    return Dep(wire_ref(ref, address), location)


def run_frame(channel: Channel, batch: Sequence[PendingTask], address: Address) -> Run:
    """Return the message that runs a batch, with the templates that were not sent on the channel yet."""
    templates: list[Template] = []
    sent = channel.templates_sent
    for task in batch:
        template = task.spec.template
        if template.number not in sent:
            if len(sent) >= TEMPLATES:
                sent.clear()
            sent.add(template.number)
            templates.append(template)
    return Run([wire_call(t, address) for t in batch], templates)


def locality_of(tasks: Iterable[PendingTask]) -> dict[str, int]:
    """Return the bytes of these tasks' arguments by node, without those that frames carry."""
    nbytes: dict[str, int] = {}
    for task in tasks:
        for location in (task.args, *(ref._entry.location for ref in task.deps)):
            if isinstance(location, Stored):
                nbytes[location.node_id] = nbytes.get(location.node_id, 0) + location.nbytes
    return nbytes


def cancelled_error(task: PendingTask) -> TaskCancelledError:
    """Return the error of a task that was cancelled."""
    return TaskCancelledError(f"task {task.spec.name} ({task.task_id}) was cancelled")


def overdue_error(task: PendingTask) -> TaskTimeoutError:
    """Return the error of a task that its worker should have stopped, and did not."""
    return TaskTimeoutError(
        f"task {task.spec.name} ({task.task_id}) ran longer than its timeout of "
        f"{task.spec.template.timeout_s:g} s"
    )


E = TypeVar("E", bound=StokerError)


def error_for_task(task: PendingTask, error: E) -> E:
    """Return ``error`` with the name of the task that it is of."""
    return type(error)(
        f"task {task.spec.name} ({task.task_id}): {error.message}", extra=error.extra
    )


def start_deadline_error(task: PendingTask, why: str) -> TaskTimeoutError:
    """Return the error of a task whose ``start_deadline`` passed."""
    return TaskTimeoutError(
        f"task {task.spec.name} ({task.task_id}) did not start within its start_deadline of "
        f"{task.spec.options.start_deadline:g} s\n"
        f"{why}"
    )


def failed_argument(task: PendingTask) -> Failed | None:
    """Return the failure of the first argument that failed, if one did."""
    for ref in task.deps:
        location = ref._entry.location
        if isinstance(location, Failed):
            return location
    return None


def unready_argument(task: PendingTask) -> Entry | None:
    """Return the first argument that is not ready yet, or None."""
    for ref in task.deps:
        entry = ref._entry
        if entry.location is None:
            return entry
    return None
