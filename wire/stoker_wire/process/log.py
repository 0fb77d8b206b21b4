"""Logs of a process: JSON lines for machines, aligned text on a terminal, through the standard logging.

Every module logs to ``logging.getLogger(__name__)``; entry points (``run_service``, the head) call
:func:`configure` once. A process that never does, such as a driver, shows warnings and errors as Python
does by default. What a record carries in ``extra`` becomes fields of its line, and a line that is logged
while a request is answered carries that request's id. Secrets and bodies are never logged.
"""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TextIO

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}

REQUEST_ID: ContextVar[str] = ContextVar("stoker_request_id", default="")
"""Id of the request being answered: logs and outgoing calls carry it, so that one id follows a chain."""

_SERVICE_PREFIX = "stoker_"
_LIBRARIES = frozenset({"stoker_wire", "stoker_kernels", "stoker_migrations"})
_ROOTS = ("stoker", "stoker_gcs", "stoker_scheduler", "stoker_nodelet", *sorted(_LIBRARIES))
"""Loggers of our packages: these alone log below INFO, where the level says so."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_EVENT_WIDTH = 30
_RESET, _BOLD, _DIM, _BLUE, _CYAN, _MAGENTA = (
    "\x1b[0m", "\x1b[1m", "\x1b[2m", "\x1b[34m", "\x1b[36m", "\x1b[35m",
)  # fmt: skip
_ESCAPED = {
    code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"
}
"""Control characters, which come with names of users' jobs: JSON escapes them too."""
_LEVEL_COLOURS = {
    "debug": "\x1b[32m",
    "info": "\x1b[32m",
    "warning": "\x1b[33m",
    "error": "\x1b[31m",
    "critical": "\x1b[31m",
}


def configure(level: str = "info", format: str = "auto", *, stream: TextIO | None = None) -> None:
    """Send what is logged from ``level`` on to ``stream`` (default: stderr).

    ``format`` is ``json``, ``text`` or ``auto`` (text if ``stream`` is a terminal). Packages that are
    not ours log from INFO on at most, asyncio from WARNING on.
    """
    stream = sys.stderr if stream is None else stream
    number = LEVELS[level]
    is_terminal = stream.isatty()
    handler = logging.StreamHandler(stream)
    if format == "text" or (format == "auto" and is_terminal):
        handler.setFormatter(TextFormatter(colours=is_terminal))
    else:
        handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(number, logging.INFO))
    for name in _ROOTS:
        logging.getLogger(name).setLevel(number)
    logging.getLogger("asyncio").setLevel(max(number, logging.WARNING))


def service_logger(service: str) -> logging.Logger:
    """Return the logger of a service itself, the root of those of its modules."""
    return logging.getLogger(_SERVICE_PREFIX + service)


class JsonFormatter(logging.Formatter):
    """One JSON object per line: ``event``, ``level``, ``at``, ``logger``, and what the record adds.

    ``service`` is there for loggers of a service, ``request_id`` while a request is answered,
    ``exception`` for an error that was logged with its trace.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a line."""
        line: dict[str, Any] = {
            "event": record.getMessage(),
            "level": record.levelname.lower(),
            "at": _time_of(record),
            "logger": record.name,
            **_fields_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack_info"] = self.formatStack(record.stack_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """Aligned lines for people: time, level, event, logger and fields; a trace follows below.

    Control characters are escaped: what is logged may be another's text, and this may be a terminal.
    """

    def __init__(self, *, colours: bool = False) -> None:
        super().__init__()
        self._colours = colours

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a line, and the lines of its trace."""
        paint = _painted if self._colours else _plain
        level = record.levelname.lower()
        line = " ".join(
            [
                paint(_time_of(record), _DIM),
                f"[{paint(f'{level:<9}', _LEVEL_COLOURS.get(level, ''), _BOLD)}]",
                paint(f"{record.getMessage().translate(_ESCAPED):<{_EVENT_WIDTH}}", _BOLD),
                f"[{paint(record.name, _BOLD, _BLUE)}]",
                *(
                    f"{paint(name, _CYAN)}={paint(_in_line(value), _MAGENTA)}"
                    for name, value in _fields_of(record).items()
                    if name != "service"  # the logger's name says it
                ),
            ]
        )
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info).translate(_ESCAPED)
        if record.stack_info:
            line += "\n" + self.formatStack(record.stack_info).translate(_ESCAPED)
        return line


def _fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields of a record besides those that every record has."""
    fields: dict[str, Any] = {}
    package = record.name.partition(".")[0]
    if package.startswith(_SERVICE_PREFIX) and package not in _LIBRARIES:
        fields["service"] = package.removeprefix(_SERVICE_PREFIX)
    request_id = REQUEST_ID.get()
    if request_id:
        fields["request_id"] = request_id
    fields.update((name, value) for name, value in vars(record).items() if name not in _STANDARD)
    return fields


def _time_of(record: logging.LogRecord) -> str:
    at = datetime.fromtimestamp(record.created, UTC)
    return at.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _in_line(value: object) -> str:
    return str(value).translate(_ESCAPED).replace("\n", "\\n")


def _painted(text: str, *codes: str) -> str:
    return "".join(codes) + text + _RESET


def _plain(text: str, *_: str) -> str:
    return text
