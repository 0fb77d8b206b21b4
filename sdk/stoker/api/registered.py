"""Functions that callers outside know by name and version: their records, in the keys of a namespace.

Written by :func:`stoker.register`, read by whoever makes calls for callers outside. Nothing in it is a pickle
but the function itself, which is opaque to all but the worker that runs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec

from stoker.exceptions import BadRequestError, SerializationError
from stoker.runtime.options.options import TaskOptions
from stoker.runtime.tasks.functions import INLINE_NBYTES, TEMPLATE_NUMBERS
from stoker.runtime.tasks.task_spec import FunctionSpec
from stoker_wire.http.gateway.calls import FUNCTION_PREFIX
from stoker_wire.messages.cluster import Demand
from stoker_wire.messages.data import Template

if TYPE_CHECKING:
    from stoker.runtime.tasks.submitter import TaskSubmitter

MAX_NAME = 200
"""Of a name and a version together with their prefix a key of the store is made."""


class Registration(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A registered function: what a task of it needs, and what people see of it."""

    name: str
    version: str
    function: str
    """The hash of the pickle."""
    blob: bytes
    demand: Demand
    """With no job: each call is of its caller's."""
    timeout_s: float = 0.0
    start_deadline_s: float | None = None
    max_calls: int = 0
    max_retries: int = 0
    max_oom_retries: int = 0
    retry_delay_s: float = 0.0
    retry_exceptions: bytes = b""
    history: bool = True
    signature: str = ""
    doc: str = ""

    def spec(self, submitter: TaskSubmitter, job_id: str) -> FunctionSpec:
        """Return what calls of it in a job share."""
        template = Template(
            number=next(TEMPLATE_NUMBERS),
            function=self.function,
            name=self.name,
            timeout_s=self.timeout_s,
            max_calls=self.max_calls,
            retry_exceptions=self.retry_exceptions,
            history=self.history,
            blob=self.blob if len(self.blob) <= INLINE_NBYTES else b"",
        )
        return FunctionSpec(
            submitter=submitter,
            function=self.function,
            blob=self.blob,
            name=self.name,
            template=template,
            options=TaskOptions(
                max_retries=self.max_retries,
                max_oom_retries=self.max_oom_retries,
                retry_delay=self.retry_delay_s,
                start_deadline=self.start_deadline_s,
            ),
            demand=msgspec.structs.replace(self.demand, job_id=job_id),
        )


def key_of(name: str, version: str) -> str:
    """Return the key at which a version of a function is kept."""
    return f"{versions_of(name)}{quote(version, safe='')}"


def versions_of(name: str) -> str:
    """Return the prefix of the keys of all versions of a function."""
    return f"{FUNCTION_PREFIX}{quote(name, safe='')}/"


def check_name(text: object, field: str) -> str:
    """Return a name or a version; BadRequestError says what is wrong with it."""
    if not isinstance(text, str) or not text.strip() or "\0" in text or len(text) > MAX_NAME:
        raise BadRequestError(
            f"register(): {field}={text!r:.80} is no text of 1 to {MAX_NAME} characters",
            field=field,
        )
    return text


encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Registration)


def decode(raw: bytes, key: str) -> Registration:
    """Return what a key holds; SerializationError if that is no registered function."""
    try:
        return _decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SerializationError(
            f"the key {key!r} holds no registered function\n"
            f"{error}; another version of stoker, or something else, wrote it: register the function again"
        ) from None
