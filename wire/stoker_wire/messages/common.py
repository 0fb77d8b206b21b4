"""Parts that several messages share: resources, constraints, addresses, runtime environments.

A type is here once two modules of messages need it; it imports none of them.
"""

from __future__ import annotations

import re
import sys
from enum import StrEnum
from typing import Annotated, Any, dataclass_transform

import msgspec

from stoker_wire.amounts import SMALLEST_PART
from stoker_wire.ids import Prefix, id_pattern


# msgspec hands `frozen` and `kw_only` down to subclasses; type checkers learn it from this decorator.
@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Root of requests: frozen, keyword-only, an unknown field is an error that names it."""


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """Root of what servers reply: frozen, and lenient to fields that a newer peer adds."""


MAX_INT64 = 2**63 - 1
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=MAX_INT64)]
"""An integer that every encoding and SQL can hold; JSON alone would decode a larger one."""
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT64)]
"""A number of things, of bytes or of attempts."""


def stated(**rules: Any) -> msgspec.Meta:
    """Return rules of JSON Schema that a handler checks, with a better message than a decoder has.

    They are in the API's document, so that a client can know them.
    """
    return msgspec.Meta(extra_json_schema=rules)


Finite = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
"""A number that is neither infinite nor NaN."""
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
"""An amount of a resource; memory is in bytes."""
Part = Annotated[Amount, stated(anyOf=[{"const": 0}, {"minimum": SMALLEST_PART}])]
"""An amount that a scheduler is to count: none, or not too small to be counted."""
Resources = Annotated[dict[str, float], msgspec.Meta(description="name -> amount; memory in bytes")]
"""Resources in a reply: what is left of a node is less than nothing where a lease lends its CPUs."""
Offered = Annotated[dict[str, Amount], msgspec.Meta(description="name -> amount; memory in bytes")]
"""Resources of a node, or of a lease."""
MAX_NAMES = 256
"""Resources, or labels, that one request may name; a node may have any number of resources."""
MAX_NAME = 256
Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
"""A name or an id that a caller chooses: two of the longest fit one entry of an index of PostgreSQL."""
UnixUser = Annotated[
    str, msgspec.Meta(max_length=64, pattern=r"^([A-Za-z_][A-Za-z0-9_.@-]*[$]?)?$")
]
"""The name of a user account of nodes, or none: a number is not the same account on each of them."""
MAX_TEXT = 65_536
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
MAX_PARTS = 1000
"""Parts of one kind of a runtime environment, as its variables."""
_PARTS = msgspec.Meta(max_length=MAX_PARTS)
_WHOLE_OR_LESS = {
    "GPU": {
        "type": "number",
        "anyOf": [
            {"const": 0},
            {"minimum": SMALLEST_PART, "maximum": 1},
            {"minimum": 1, "maximum": 1e6, "multipleOf": 1},
        ],
    }
}
Asked = Annotated[
    dict[Name, Part],
    msgspec.Meta(max_length=MAX_NAMES, description="name -> amount; memory in bytes"),
    stated(properties=_WHOLE_OR_LESS, **{"not": {"required": ["GPU", "gpu_memory"]}}),
]
"""Resources that a request asks for."""
Labels = dict[str, str]
NodeLabels = Annotated[dict[Name, Text], msgspec.Meta(max_length=MAX_NAMES)]
"""The labels of a node."""
_LABEL_VALUE = r"[A-Za-z0-9_][A-Za-z0-9_ ./+:@-]*"
Selector = Annotated[
    dict[
        Annotated[Name, stated(minLength=1)],
        Annotated[
            Text, stated(pattern=rf"^!?({_LABEL_VALUE}|in\({_LABEL_VALUE}(,{_LABEL_VALUE})*\))$")
        ],
    ],
    msgspec.Meta(max_length=MAX_NAMES),
]
"""Conditions on labels (:mod:`stoker_wire.constraints.label_selectors`)."""
Metadata = Annotated[dict[Name, Text], msgspec.Meta(max_length=MAX_NAMES)]
"""Notes of a user on a job."""
NoNul = Annotated[str, msgspec.Meta(pattern=r"^[^\x00]*$")]
IMAGE = r"^([A-Za-z0-9][A-Za-z0-9._:/@+-]*)?$"
"""The name of an image: no option of an engine's command can be one."""
MAX_IMAGE = 500
"""Text that can be an argument or a variable of a process."""
MAX_SECONDS = 1e9
"""The longest duration, 31 years: whoever means "for ever" leaves it out."""
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)]
PositiveSeconds = Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)]
MAX_TIME = 1e11
Time = Annotated[float, msgspec.Meta(ge=0, le=MAX_TIME)]
"""Seconds since 1970."""
Id = Annotated[str, msgspec.Meta(max_length=512)]
"""An id in a record of another process: SQL has it in an index, which bounds it."""


def id_rule(prefix: Prefix) -> msgspec.Meta:
    """Return the rule of ids of a kind, which :func:`stoker_wire.ids.check_id` checks."""
    return stated(pattern=f"^{id_pattern(prefix)}$")


JobId = Annotated[Name, id_rule(Prefix.JOB)]
ActorId = Annotated[Name, id_rule(Prefix.ACTOR)]
GroupId = Annotated[Name, id_rule(Prefix.GROUP)]
NodeId = Annotated[str, id_rule(Prefix.NODE)]
ObjectId = Annotated[str, id_rule(Prefix.OBJECT)]
RequestId = Annotated[str, id_rule(Prefix.REQUEST)]


def states_rule(*kinds: type[StrEnum] | str) -> msgspec.Meta:
    """Return the rule of a filter by state: one of the states, or several with commas between."""
    names = [name for kind in kinds for name in ([kind] if isinstance(kind, str) else kind)]
    one = f"({'|'.join(dict.fromkeys(names))})"
    return stated(pattern=rf"^{one}(,{one})*$")


INDEX_KEYS = stated(propertyNames={"pattern": r"^(0|-?[1-9][0-9]{0,17})$"})
"""The rule of a mapping from integers, which JSON has as texts."""
ServiceUrl = Annotated[
    str, stated(format="uri", pattern=r"^https?://[A-Za-z0-9.-]+:[1-9][0-9]{0,3}(/.*)?$")
]
"""The URL of a service: its host and port are given."""


NodeFilterText = Annotated[
    str,
    msgspec.Meta(
        max_length=4096,
        description="a condition on nodes, as labels.rack != 'r7' and free.gpu >= 2; '' for none",
        extra_json_schema={"format": "node-filter"},
    ),
]

ANY_NAMESPACE = "*"
"""Among the namespaces of a token: all of them."""


class Role(StrEnum):
    """The purpose of a token. The first three are services; ``job`` is a process of a job.

    ``join`` is a machine that has no secret yet, and may ask for it.
    """

    NODE = "node"
    SCHEDULER = "scheduler"
    GCS = "gcs"
    ADMIN = "admin"
    USER = "user"
    JOB = "job"
    VIEWER = "viewer"
    JOIN = "join"


class SpreadPolicy(StrEnum):
    """Policy by which a demand chooses among feasible nodes."""

    HYBRID = "hybrid"
    """Pack nodes up to a utilisation threshold, then spread; CPU work avoids GPU nodes."""
    SPREAD = "spread"
    """Take the feasible nodes round-robin while they are at most half used, then the least loaded."""


class Strategy(Message):
    """Placement of a demand. ``node_id`` pins it to a node; ``soft`` makes that a preference.

    With a ``group_id`` it runs in a bundle of that placement group: number ``bundle``, or any (-1); with
    ``capture_child_tasks``, what it starts does so too.
    """

    policy: SpreadPolicy = SpreadPolicy.HYBRID
    node_id: str | None = None
    soft: bool = False
    group_id: str = ""
    bundle: Annotated[int, msgspec.Meta(ge=-1, le=MAX_INT64)] = -1
    capture_child_tasks: bool = False


class OnInfeasible(StrEnum):
    """Treatment of a demand that no node could ever satisfy."""

    ERROR = "error"
    WAIT = "wait"


class KernelSpec(Message):
    """Kernels to have compiled before a worker starts: of one op at one size, or of a user's function.

    Either ``op`` names a workload of stoker_kernels, with the ``dtype`` and ``sizes`` that differ from
    its own, or ``call`` is a function ("module:function") that is run once without arguments on the
    meta device.
    """

    op: NoNul = ""
    dtype: NoNul = ""
    sizes: Annotated[dict[NoNul, Int64], _PARTS] = {}
    call: NoNul = ""


PICKLED = "pickle:"
"""Before a pickled function in a ``worker_process_setup``."""


class RuntimeEnv(Message):
    """Additions to the node's own Python environment for a worker.

    ``working_dir`` and ``py_modules`` are content hashes of packages stored in the gcs
    (``PUT /v1/packages/{hash}``); a worker unpacks them and puts them on ``sys.path``
    (``working_dir`` is also the current directory). ``sys_path`` and ``cwd`` are paths as they are,
    used when the driver is on the same machine. ``preload`` names modules that the fork server
    imports before it forks. ``pip`` are requirement lines, installed into a venv of their own.
    ``kernels`` are compiled into the node's cache first, for the GPUs of the lease. ``uv`` are requirement
    lines for uv, ``uv_project`` the package of a ``pyproject.toml`` with its ``uv.lock``. ``setup`` is a
    shell command that is run once in the venv. ``worker_process_setup`` is run in each worker before its
    first call: "module:function", or a pickled function after "pickle:", in base64. ``conda`` is the name, or
    the folder, of an environment of conda that nodes have, ``conda_file`` the text of the
    ``environment.yml`` of one that they make. ``image_uri`` is the image in whose containers workers run,
    which has a Python and Stoker of its own.
    """

    env_vars: Annotated[dict[NoNul, NoNul], _PARTS] = {}
    working_dir: str | None = None
    py_modules: Annotated[tuple[str, ...], _PARTS] = ()
    pip: Annotated[tuple[str, ...], _PARTS] = ()
    preload: Annotated[tuple[str, ...], _PARTS] = ()
    sys_path: Annotated[tuple[str, ...], _PARTS] = ()
    cwd: NoNul | None = None
    kernels: Annotated[tuple[KernelSpec, ...], _PARTS] = ()
    uv: Annotated[tuple[str, ...], _PARTS] = ()
    uv_project: str | None = None
    setup: NoNul = ""
    worker_process_setup: str = ""
    conda: Annotated[NoNul, msgspec.Meta(max_length=MAX_TEXT)] = ""
    conda_file: Annotated[NoNul, msgspec.Meta(max_length=MAX_TEXT)] = ""
    image_uri: Annotated[str, msgspec.Meta(pattern=IMAGE, max_length=MAX_IMAGE)] = ""

    @property
    def not_in_images(self) -> tuple[str, ...]:
        """Return the names of what is set and would be done by the node, outside of its images."""
        names = ("pip", "uv", "uv_project", "conda", "conda_file", "setup", "kernels")
        return tuple(name for name in names if getattr(self, name))

    @property
    def installs(self) -> str:
        """Return in words what a node installs before a worker can start, without passwords; or ''."""
        parts = []
        if self.working_dir or self.py_modules:
            parts.append("packages")
        for tool, lines in (("pip", self.pip), ("uv", self.uv)):
            if lines:
                more = f" and {len(lines) - _NAMED} more" if len(lines) > _NAMED else ""
                parts.append(f"{tool} ({', '.join(map(_shown, lines[:_NAMED]))}{more})")
        if self.conda or self.conda_file:
            parts.append(f"conda ({self.conda or 'an environment.yml'})"[:_MAX_SHOWN])
        if self.image_uri:
            parts.append(f"image ({self.image_uri})"[:_MAX_SHOWN])
        if self.uv_project:
            parts.append("uv (a project)")
        if self.setup:
            parts.append("setup")
        if self.kernels:
            parts.append("kernels")
        return ", ".join(parts)


_NAMED = 3
"""Requirements that are named; of more it is said how many."""
_MAX_SHOWN = 200
_PASSWORD = re.compile(r"//[^/@\s]*@")


def without_passwords(text: str) -> str:
    """Return a text in which addresses have no user and no password."""
    return _PASSWORD.sub("//...@", text)


def _shown(requirement: str) -> str:
    return without_passwords(requirement)[:_MAX_SHOWN]


class Address(msgspec.Struct, frozen=True, array_like=True):
    """Address at which a runtime (driver or worker) listens for data-path connections.

    ``unix`` is preferred when the reader's ``host_id`` is the same, else ``url``.
    """

    peer_id: str
    node_id: str
    host_id: str
    unix: str
    url: str


class ErrorInfo(Record):
    """An error as data: what :func:`stoker_wire.errors.error_for` needs to raise it again."""

    code: str
    message: str
    extra: dict[str, Any] = {}

    def __post_init__(self) -> None:
        """Turn integers that JSON can say, and MessagePack cannot, into text."""
        if self.extra:
            msgspec.structs.force_setattr(self, "extra", _in_64_bits(self.extra))


def _in_64_bits(value: Any) -> Any:
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else str(value)
    if isinstance(value, dict):
        return {_in_64_bits(key): _in_64_bits(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_in_64_bits(one) for one in value]
    return value


class Empty(Record):
    """An empty reply."""


class ProcessMemory(Record):
    """The memory of one process, and its command."""

    pid: Int64
    nbytes: Int64
    command: str = ""


class MemoryUse(Record):
    """The memory as it was when a worker was stopped for it, by the node's memory monitor.

    ``used_bytes`` is what the worker had, with all that it started; ``limit_bytes`` what its lease declared,
    0 for nothing. ``largest`` are the largest processes of the node's work.
    """

    used_bytes: Int64
    limit_bytes: Int64
    node_used_bytes: Int64
    node_total_bytes: Int64
    largest: tuple[ProcessMemory, ...] = ()

    @property
    def text(self) -> str:
        """The numbers in words, two lines."""
        limit = f" of memory={_mib(self.limit_bytes)}" if self.limit_bytes else ""
        node = f"{_mib(self.node_used_bytes)} of {_mib(self.node_total_bytes)}"
        largest = ", ".join(f"{one.command} {one.pid} ({_mib(one.nbytes)})" for one in self.largest)
        return (
            f"it used {_mib(self.used_bytes)}{limit}, the node {node}\n"
            f"largest processes of the node's work: {largest or 'none'}"
        )


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.0f} MiB"
