"""Exceptions to data and back: a remote exception arrives as the user's own type.

The worker turns what was raised into a :class:`Failed`; the reader turns that into a ``TaskError``
that is also an instance of the user's class, with the remote traceback in its text. The traceback
travels as text always, the pickled exception only on top of it, so a cause is never lost because
it does not pickle.
"""

from __future__ import annotations

import pickle
import traceback
from typing import Any

import cloudpickle
import msgspec

from stoker.exceptions import StokerError, TaskError
from stoker_wire.errors import error_for
from stoker_wire.messages.common import ErrorInfo
from stoker_wire.messages.data import Failed

_MAX_PICKLED = 1 << 20
_MAX_TEXT = 20_000


def failed_by(error: BaseException, *, skip_frames: int = 0) -> Failed:
    """Return what the user's code raised, as data. ``skip_frames`` leaves out our own frames."""
    if isinstance(error, StokerError) and not isinstance(error, TaskError):
        return failed_with(error)
    trace = error.__traceback__
    for _ in range(skip_frames):
        trace = trace.tb_next if trace is not None else None
    text = "".join(traceback.format_exception(type(error), error, trace))
    if isinstance(error, TaskError) and error.extra.get("traceback"):
        # A task that failed because a task it waited for did: show both, as the user would.
        text = f"{error.extra['traceback']}\n\nraised again by:\n{text}"
    pickled: bytes | None
    try:
        pickled = cloudpickle.dumps(getattr(error, "cause", None) or error, 5)
        if len(pickled) > _MAX_PICKLED:
            pickled = None
    except Exception:
        pickled = None
    return Failed(
        code=TaskError.code,
        message=_text_of(error),
        type_name=f"{type(error).__module__}.{type(error).__qualname__}",
        traceback=text[-_MAX_TEXT:],
        pickled=pickled,
    )


def failed_with(error: StokerError) -> Failed:
    """Return an error of Stoker's own as data."""
    return Failed(
        code=error.code,
        message=error.message,
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
    extra = {"type": failed.type_name, "traceback": failed.traceback}
    if failed.pickled is not None:
        try:
            cause = pickle.loads(failed.pickled)
        except Exception as error:
            message += f"\n(the exception object itself could not be read back: {error!r})"
        else:
            return _as_both(cause, message, extra)
    return TaskError(message, extra=extra)


def info_of(failed: Failed) -> ErrorInfo:
    """Return what the task history keeps of a failure."""
    message = f"{failed.type_name}: {failed.message}" if failed.type_name else failed.message
    return ErrorInfo(code=failed.code, message=message[:4000])


def _as_both(cause: BaseException, message: str, extra: dict[str, Any]) -> StokerError:
    """Return a TaskError that is also an instance of the cause's class, with its attributes."""
    cls = type(cause)
    if isinstance(cause, StokerError):
        cause.message = message
        return cause
    try:
        both = type(f"TaskError({cls.__name__})", (TaskError, cls), {"__module__": cls.__module__})
        error: StokerError = both.__new__(both, *cause.args)
    except TypeError:  # a layout or a __new__ that cannot be combined
        error = TaskError.__new__(TaskError)
    StokerError.__init__(error, message, extra=extra)
    error.args = cause.args
    state = getattr(cause, "__dict__", None)
    for name, value in (state or {}).items():
        if name not in {"message", "field", "explain", "extra"}:
            error.__dict__.setdefault(name, value)
    error.cause = cause  # type: ignore[attr-defined]
    error.__cause__ = cause if isinstance(cause, Exception) else None
    return error


def _text_of(error: BaseException) -> str:
    try:
        return str(error)[:4000]
    except Exception:
        return f"<str() of {type(error).__name__} raised>"
