"""Exceptions to data and back: a remote exception arrives as the user's own type.

The worker turns what was raised into a :class:`Failed`; the reader turns that into a ``TaskError``
that is also an instance of the user's class, with the remote traceback in its text. The traceback
travels as text always, the pickled exception only on top of it, so a cause is never lost because
it does not pickle.
"""

from __future__ import annotations

import contextlib
import inspect
import pickle
import traceback
import types
from typing import Any, NamedTuple

import cloudpickle
import msgspec

from stoker.exceptions import StokerError, TaskError
from stoker_wire.errors import error_for
from stoker_wire.messages.common import ErrorInfo
from stoker_wire.messages.data import Failed

_MAX_PICKLED = 16 << 20
_MAX_TEXT = 20_000
_HEAP_TYPE = 1 << 9
"""The flag of classes that are made in Python."""


def failed_by(error: BaseException, *, skip_frames: int = 0) -> Failed:
    """Return what the user's code raised, as data. ``skip_frames`` leaves out our own frames.

    ``SystemExit`` and its like, which would end the reader too, arrive as a plain ``TaskError``.
    """
    if isinstance(error, StokerError) and type(error_for(error.code, "")) is type(error):
        return failed_with(error)
    trace = error.__traceback__
    for _ in range(skip_frames):
        trace = trace.tb_next if trace is not None else None
    text = "".join(traceback.format_exception(type(error), error, trace))
    kind, message, cause = _name_of(type(error)), _text_of(error), error
    if isinstance(error, TaskError):
        # A task that failed because a task it waited for did: show both, as the user would.
        facts = error._stoker_facts if isinstance(error, _Both) else error.extra
        cause = error._stoker_cause if isinstance(error, _Both) else error
        kind, message = facts.get("type", kind), facts.get("text", message)
        if facts.get("traceback"):
            # Its text has the first traceback in it, and so would every further one.
            text = f"{facts['traceback']}\nwhich a get() raised again:\n{_frames(trace)}"
    return Failed(
        code=TaskError.code,
        message=_encodable(message),
        type_name=kind,
        traceback=_encodable(text[-_MAX_TEXT:]),
        pickled=_pickled(cause),
    )


def _encodable(text: str) -> str:
    """Return text as it can travel: names of files that are no UTF-8 have half surrogate pairs."""
    return text.encode(errors="replace").decode()


def _frames(trace: types.TracebackType | None) -> str:
    return "".join(traceback.format_tb(trace))


def _name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _pickled(error: BaseException) -> bytes | None:
    """Return the exception as it travels, or None where only its text can."""
    if not isinstance(error, Exception) or type(error) is TaskError:
        return None
    try:
        pickled: bytes = cloudpickle.dumps(_portable(error), 5)
    except Exception:
        return None
    return pickled if len(pickled) <= _MAX_PICKLED else None


def _portable(error: BaseException) -> BaseException | _Parts:
    """Return what to pickle for an exception: itself, or the parts to make it of.

    Python would call ``__init__(*args)`` to make it again, which fits few ``__init__`` of users.
    """
    cls = type(error)
    own_init = isinstance(cls.__init__, types.FunctionType)
    own_reduce = cls.__reduce__ is not BaseException.__reduce__
    if own_init and not own_reduce and cls.__reduce_ex__ is object.__reduce_ex__:
        return _Parts(cls, error.args, error.__dict__)
    return error


class _Parts(NamedTuple):
    """An exception that is made again without its ``__init__``."""

    cls: type[BaseException]
    args: tuple[Any, ...]
    state: dict[str, Any]


def _whole(value: BaseException | _Parts) -> BaseException:
    if not isinstance(value, _Parts):
        return value
    error = _builtin_of(value.cls).__new__(value.cls, *value.args)
    BaseException.__setattr__(error, "args", value.args)
    error.__dict__.update(value.state)
    return error


def _builtin_of(cls: type[BaseException]) -> type[BaseException]:
    """Return the class that decides the layout in memory: the first that is not made in Python."""
    return next(c for c in cls.__mro__ if not c.__flags__ & _HEAP_TYPE)


def failed_with(error: StokerError) -> Failed:
    """Return an error of Stoker's own as data."""
    return Failed(
        code=error.code,
        message=_encodable(error.message),
        type_name=f"{type(error).__module__}.{type(error).__qualname__}",
        extra=msgspec.msgpack.encode(error.extra, enc_hook=str) if error.extra else b"",
    )


def error_of(failed: Failed, *, task: str = "") -> StokerError:
    """Return the exception to raise for ``failed``; a new one each time, so tracebacks stay own."""
    if failed.code != TaskError.code:
        extra = msgspec.msgpack.decode(failed.extra) if failed.extra else {}
        return error_for(failed.code, failed.message, extra=extra)
    message = f"{failed.type_name}: {failed.message}"
    if failed.traceback:
        message += f"\n\nremote traceback{f' of {task}' if task else ''}:\n{failed.traceback}"
    extra = {"type": failed.type_name, "text": failed.message, "traceback": failed.traceback}
    if failed.pickled is not None:
        try:
            cause = _whole(pickle.loads(failed.pickled))
        except Exception as error:
            message += f"\n(the exception object itself could not be read back: {error!r})"
        else:
            return _as_both(cause, message, extra)
    return TaskError(message, extra=extra)


def info_of(failed: Failed) -> ErrorInfo:
    """Return what the task history keeps of a failure."""
    message = f"{failed.type_name}: {failed.message}" if failed.type_name else failed.message
    return ErrorInfo(code=failed.code, message=message[:4000])


class _Both(TaskError):
    """The half of a remote exception that is ours; the other half is the user's class.

    The user's class comes first among the bases, so that its attributes and methods are the ones
    that user code finds; only text and pickling are ours.
    """

    _stoker_text: str
    _stoker_facts: dict[str, Any]
    _stoker_cause: BaseException

    def _str(self) -> str:
        return self._stoker_text

    def _reduce(self, protocol: object = None) -> tuple[Any, ...]:
        return _again, (_portable(self._stoker_cause), self._stoker_text, self._stoker_facts)


def _as_both(cause: BaseException, message: str, extra: dict[str, Any]) -> StokerError:
    """Return a TaskError that is also an instance of the cause's class, with its attributes."""
    try:
        error = _combined(cause, message)
    except Exception:  # a class that forbids subclasses, or a __new__ with rules of its own
        return TaskError(message, extra=extra)
    mine = {
        "message": message,
        "field": None,
        "explain": None,
        "extra": extra,
        "cause": cause,
        "_stoker_text": message,
        "_stoker_facts": extra,
        "_stoker_cause": cause,
    }
    error.__dict__.update({**mine, **getattr(cause, "__dict__", {})})
    if isinstance(cause, Exception):
        BaseException.__setattr__(error, "__cause__", cause)
    return error


def _again(cause: BaseException | _Parts, message: str, extra: dict[str, Any]) -> StokerError:
    return _as_both(_whole(cause), message, extra)


def _combined(cause: BaseException, message: str) -> _Both:
    cls = type(cause)
    names = {
        "__module__": cls.__module__,
        "__str__": _Both._str,
        "__reduce_ex__": _Both._reduce,
        "message": message,  # hides the read-only one of exception groups
    }
    both = type(f"TaskError({cls.__name__})", (cls, _Both), names)
    builtin = _builtin_of(cls)
    # No __init__: the user's may ask for anything. What it set lies in __dict__ and in the members
    # of the C structure (errno of an OSError, start of a UnicodeError, name of an ImportError).
    error: _Both = builtin.__new__(both, *cause.args)
    BaseException.__setattr__(error, "args", cause.args)
    for kind in builtin.__mro__[: builtin.__mro__.index(BaseException)]:
        for member in vars(kind).values():
            if inspect.ismemberdescriptor(member) or inspect.isgetsetdescriptor(member):
                with contextlib.suppress(AttributeError, TypeError):
                    member.__set__(error, member.__get__(cause, cls))
    return error


def _text_of(error: BaseException) -> str:
    try:
        return str(error)[:4000]
    except Exception:
        return f"<str() of {type(error).__name__} raised>"
