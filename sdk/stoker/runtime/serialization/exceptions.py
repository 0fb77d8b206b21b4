"""The way of an exception between processes: it arrives as the user's own type.

The worker turns what was raised into a :class:`Failed`; the reader turns that into a ``TaskError``
that is also an instance of the user's class, with the remote traceback in its text. The traceback
travels as text always, the pickled exception only on top of it, so a cause is never lost because
it does not pickle. Workers and the owners of objects call it; it knows nothing of tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import pickle
import re
import reprlib
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import msgspec

import stoker_wire
from stoker.exceptions import StokerError, TaskError
from stoker_wire.errors import error_for
from stoker_wire.messages.common import ErrorInfo
from stoker_wire.messages.data import Failed

_MAX_PICKLED = 16 << 20
_MAX_PART = 1 << 20
"""The limit of one attribute, where the whole does not pickle."""
_MAX_TEXT = 20_000
_HEAP_TYPE = 1 << 9
"""The flag of classes that are made in Python."""
_ENDS_THE_READER = (SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError)
"""Exceptions that would end the reader, too: these arrive as a plain ``TaskError``."""
_ARGS_DESCRIPTOR: Any = vars(BaseException)["args"]
"""The descriptor of the tuple itself, whatever a class has made of the name."""
_NOT_COPIED = {
    "__dict__",
    "__traceback__",
    "__context__",
    "__cause__",
    "__suppress_context__",
    "obj",
}
_PACKAGE_FOLDER = str(Path(__file__).parents[2]) + os.sep
_INTERNAL = (
    os.path.dirname(stoker_wire.__file__) + os.sep,
    *(_PACKAGE_FOLDER + folder + os.sep for folder in ("api", "local", "runtime")),
    _PACKAGE_FOLDER + os.path.join("util", "functions.py"),
)
_RUNNER_FILES = tuple(
    os.sep + os.path.join(*path)
    for path in (
        ("asyncio", "runners.py"),
        ("asyncio", "base_events.py"),
        ("concurrent", "futures", "thread.py"),
    )
)
_ENV_FOLDER = re.compile(r"^/.*/[0-9a-f]{64}/")


def encode_exception(error: BaseException, *, task: str = "") -> Failed:
    """Encode an exception that the user's code raised in ``task``.

    ``SystemExit`` and its like, which would end the reader too, arrive as a plain ``TaskError``.
    """
    own = isinstance(error, StokerError) and not isinstance(error, TaskError)
    if isinstance(error, StokerError) and own and type(error_for(error.code, "")) is type(error):
        return encode_error(error)
    kind, message = _name_of(type(error)), _text_of(error)
    cause: BaseException | None = error
    extra: dict[str, Any] = {"task": task}
    if isinstance(error, TaskError):
        # A task that failed because one that it waited for did: show both.
        facts = error._stoker_facts if isinstance(error, _CombinedError) else error.extra
        cause = error._stoker_cause if isinstance(error, _CombinedError) else error.cause
        kind, message = facts.get("type", kind), facts.get("text", message)
        text = facts.get("traceback", "")
        # Its text has the first traceback in it, and so would every further one.
        text = (
            f"{text}\nwhich a get() raised again:\n{_frames_text(error)}"
            if text
            else _traceback_text(error)
        )
    else:
        text = _traceback_text(error)
    pickled = None
    if cause is not None:
        notes = [str(note) for note in getattr(cause, "__notes__", ())]
        _, pickled, left_behind = _portable(cause)
        extra |= {"notes": notes} if notes else {}
        if left_behind:
            text += f"(left behind, as it cannot be pickled: {', '.join(left_behind)})\n"
    return Failed(
        code=TaskError.code,
        message=_encodable(message),
        type_name=kind,
        traceback=_encodable(text[-_MAX_TEXT:]),
        pickled=pickled,
        extra=msgspec.msgpack.encode(extra, enc_hook=str),
    )


def _encodable(text: str) -> str:
    """Return text as it can travel: names of files that are no UTF-8 have half surrogate pairs."""
    return text.encode(errors="replace").decode()


def _traceback_text(error: BaseException) -> str:
    """Return the traceback as Python prints it, without internal frames and long folder names."""
    shown = traceback.TracebackException.from_exception(error, compact=True)
    _strip_internal_frames(shown)
    return "".join(shown.format())


def _frames_text(error: BaseException) -> str:
    return "".join(_user_frames(traceback.extract_tb(error.__traceback__)).format())


def _strip_internal_frames(shown: traceback.TracebackException) -> None:
    shown.stack = _user_frames(shown.stack)
    if not shown.stack:
        shown.stack = None  # type: ignore[assignment]  # the heading goes as well
    for inner in (shown.__cause__, shown.__context__, *(shown.exceptions or ())):
        if inner is not None:
            _strip_internal_frames(inner)


def _user_frames(frames: traceback.StackSummary) -> traceback.StackSummary:
    """Return the frames of the user's code, and of what that called."""
    shown = [frame for frame in frames if not frame.filename.startswith(_INTERNAL)]
    while shown and shown[0].filename.endswith(_RUNNER_FILES):
        del shown[0]
    for frame in shown:
        frame.filename = _ENV_FOLDER.sub("", frame.filename)
    return traceback.StackSummary.from_list(shown)


def _name_of(cls: type) -> str:
    if cls.__module__ in ("builtins", "__main__"):
        return cls.__qualname__
    return f"{cls.__module__}.{cls.__qualname__}"


# -- pickling --------------------------------------------------------------------------------------


class _Parts(NamedTuple):
    """An exception to be made again without its ``__init__``, which may ask for anything.

    ``members`` are those of the C structure (errno of an OSError) and ``__slots__``. The exceptions
    of a group are parts in turn, inside of ``args``.
    """

    cls: type[BaseException]
    args: tuple[Any, ...]
    state: dict[str, Any]
    members: dict[str, Any] = {}


class _Portable(NamedTuple):
    """The value to pickle for an exception, its pickle (None: only the text can travel), and what stays."""

    value: BaseException | _Parts | None
    data: bytes | None
    left_behind: list[str]


def _portable(error: BaseException) -> _Portable:
    """Return the exception as it travels: as it pickles itself, else in parts, else in most of them."""
    left_behind: list[str] = []
    attempts: tuple[Callable[[], BaseException | _Parts], ...] = (
        lambda: error if _reduces_itself(type(error)) else _parts_of(error),
        lambda: _parts_of(error),
        lambda: _parts_of(error, left_behind),
    )
    for attempt in attempts:
        with contextlib.suppress(Exception):
            value = attempt()
            data: bytes = cloudpickle.dumps(value, 5)
            if value is error:
                pickle.loads(data)  # it may leave only if it can come back
            if len(data) <= _MAX_PICKLED:
                return _Portable(value, data, left_behind)
    return _Portable(None, None, [])


def _reduces_itself(cls: type) -> bool:
    return isinstance(cls.__reduce__, types.FunctionType) or isinstance(
        cls.__reduce_ex__, types.FunctionType
    )


def _parts_of(error: BaseException, left_behind: list[str] | None = None) -> _Parts:
    """Return the parts of an exception; with ``left``, only those that pickle, and name the rest."""
    args = _ARGS_DESCRIPTOR.__get__(error)
    state, members = dict(error.__dict__), _members_of(error)
    if isinstance(error, BaseExceptionGroup):
        inner = [_portable(member).value for member in error.exceptions]
        return _Parts(type(error), (error.message, inner), state, members)
    if left_behind is not None:
        args = tuple(arg if _pickles(arg) else reprlib.repr(arg) for arg in args)
        for attributes in (state, members):
            dropped = [name for name, value in attributes.items() if not _pickles(value)]
            left_behind += [f".{name}" for name in dropped]
            for name in dropped:
                del attributes[name]
    return _Parts(type(error), args, state, members)


def _pickles(value: Any) -> bool:
    try:
        return len(cloudpickle.dumps(value, 5)) <= _MAX_PART
    except Exception:
        return False


def _members_of(error: BaseException) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for name, member in _descriptors(type(error)).items():
        with contextlib.suppress(AttributeError):
            members[name] = member.__get__(error, type(error))
    return members


def _descriptors(cls: type) -> dict[str, Any]:
    """Return the descriptors of what an exception keeps outside of ``__dict__``, but for its args."""
    classes = cls.__mro__[: cls.__mro__.index(BaseException)]
    return {
        name: member
        for kind in reversed(classes)
        if kind is not BaseExceptionGroup  # its members are its args
        for name, member in vars(kind).items()
        if inspect.ismemberdescriptor(member) or inspect.isgetsetdescriptor(member)
        if name not in _NOT_COPIED and name != "__weakref__"
    }


def _restored(value: BaseException | _Parts) -> BaseException:
    if not isinstance(value, _Parts):
        return value
    error: BaseException = _instantiate(value.cls, value)
    error.__dict__.update(value.state)
    return error


def _instantiate(cls: type[BaseException], parts: _Parts) -> Any:
    args = parts.args
    if issubclass(cls, BaseExceptionGroup):
        args = (args[0], [_restored(member) for member in args[1]])
    error = _layout_of(cls).__new__(cls, *args)
    _ARGS_DESCRIPTOR.__set__(error, args)
    descriptors = _descriptors(cls)
    for name, member in parts.members.items():
        with contextlib.suppress(AttributeError, TypeError, KeyError):
            descriptors[name].__set__(error, member)
    return error


def _layout_of(cls: Any) -> Any:
    """Return the class that decides the layout in memory: the first base not made in Python."""
    while cls.__flags__ & _HEAP_TYPE:
        cls = cls.__base__
    return cls


def encode_error(error: StokerError) -> Failed:
    """Encode an error of Stoker's own, whose class its code names."""
    return Failed(
        code=error.code,
        message=_encodable(error.message),
        type_name=f"{type(error).__module__}.{type(error).__qualname__}",
        extra=msgspec.msgpack.encode(error.extra, enc_hook=str) if error.extra else b"",
    )


# -- reading ------------------------------------------------------------------------------------------


def decode_error(failed: Failed) -> StokerError:
    """Return the exception to raise for ``failed``: a new one each time, so each has its own traceback."""
    extra = msgspec.msgpack.decode(failed.extra) if failed.extra else {}
    if failed.code != TaskError.code:
        return error_for(failed.code, failed.message, extra=extra)
    task = extra.get("task")
    raised = f"{failed.type_name}: {failed.message}" if failed.message else failed.type_name
    first, newline, rest = raised.partition("\n")
    message = f"task {task} raised {first}" if task else first
    message += newline + rest
    if failed.traceback:
        message += f"\n\nremote traceback:\n{failed.traceback}"
    extra |= {"type": failed.type_name, "text": failed.message, "traceback": failed.traceback}
    if failed.pickled is not None:
        try:
            cause = _restored(pickle.loads(failed.pickled))
        except Exception as error:
            message += f"\n(the exception object itself could not be read back: {error!r})"
        else:
            return _combine(cause, message, extra)
    return TaskError(message, extra=extra)


def error_info(failed: Failed) -> ErrorInfo:
    """Return a failure as the task history keeps it."""
    message = f"{failed.type_name}: {failed.message}" if failed.type_name else failed.message
    return ErrorInfo(code=failed.code, message=message[:4000])


class _CombinedError(TaskError):
    """The Stoker half of a remote exception; the other half is the user's class.

    The user's class comes first among the bases, so that user code meets its attributes and methods;
    only text and pickling are Stoker's.
    """

    _stoker_text: str
    _stoker_facts: dict[str, Any]
    _stoker_cause: BaseException

    def _stoker_str(self) -> str:
        return self._stoker_text

    def _stoker_reduce(self, protocol: object = None) -> tuple[Any, ...]:
        return _rebuild_combined, (
            _portable(self._stoker_cause).value,
            self._stoker_text,
            self._stoker_facts,
        )


class _Unregistered:
    """A base that hides a user's ``__init_subclass__``: a combined class is none of the user's program."""

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        return


def _combine(cause: BaseException, message: str, extra: dict[str, Any]) -> StokerError:
    """Return a TaskError that is also an instance of the cause's class, with its attributes."""
    if extra.get("notes"):
        cause.__dict__.setdefault("__notes__", extra["notes"])  # its own __reduce__ forgot them
    plain = TaskError(message, extra=extra)
    plain.cause = cause
    if isinstance(cause, _ENDS_THE_READER):
        return plain
    try:
        error = _instantiate_combined(cause)
    except Exception:  # a class that forbids subclasses, or a group that holds what ends the reader
        return plain
    attributes = {
        "message": message,
        "field": None,
        "explain": None,
        "extra": extra,
        "cause": cause,
        "_stoker_text": str(plain),
        "_stoker_facts": extra,
        "_stoker_cause": cause,
    }
    error.__dict__.update({**attributes, **getattr(cause, "__dict__", {})})
    return error


def _rebuild_combined(
    cause: BaseException | _Parts | None, message: str, extra: dict[str, Any]
) -> StokerError:
    if cause is None:
        return TaskError(message, extra=extra)
    return _combine(_restored(cause), message, extra)


def _instantiate_combined(cause: BaseException) -> _CombinedError:
    cls = type(cause)
    names = {
        "__module__": cls.__module__,
        "__str__": _CombinedError._stoker_str,
        "__reduce_ex__": _CombinedError._stoker_reduce,
    }
    both = type(f"TaskError({cls.__name__})", (_Unregistered, cls, _CombinedError), names)
    args = _ARGS_DESCRIPTOR.__get__(cause)
    if isinstance(cause, BaseExceptionGroup):
        args = (cause.message, cause.exceptions)
    error: _CombinedError = _instantiate(both, _Parts(cls, args, {}, _members_of(cause)))
    return error


def _text_of(error: BaseException) -> str:
    try:
        return str(error)[:4000]
    except Exception:
        return f"<str() of {type(error).__name__} raised>"
