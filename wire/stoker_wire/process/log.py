"""Structured logs: JSON lines for machines, aligned text on a terminal, nothing when disabled.

Set up once per process by ``run_service`` or the CLI; services bind their name to their logger.
Client-side modules use the standard ``logging`` (this module formats their records too), so that
importing a client does not import structlog. Secrets and bodies are never logged.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, TextIO, cast

from stoker_wire.process import fast_imports

with fast_imports.without("rich"):  # 29 ms and 5 MB, for tracebacks in colour
    import structlog

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger, Processor

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


_SHARED: tuple[Processor, ...] = (
    structlog.contextvars.merge_contextvars,
    structlog.processors.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
)


def configure(level: str = "info", format: str = "auto", *, stream: TextIO | None = None) -> None:
    """Set up structlog and the standard logging to write to ``stream`` (default: stderr).

    ``format`` is ``json``, ``text`` or ``auto`` (text if ``stream`` is a terminal). A method below
    ``level`` costs one call of an empty function.
    """
    stream = sys.stderr if stream is None else stream
    number = LEVELS[level]
    last = _renderers(stream, format)
    _configure_structlog(number, last, stream)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*_SHARED, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(number, logging.INFO))
    logging.getLogger("asyncio").setLevel(max(number, logging.WARNING))


def get_logger(service: str) -> FilteringBoundLogger:
    """Return a logger whose every line carries ``service``.

    In a process that never called :func:`configure` (a driver, a test) it tells warnings only.
    """
    if not structlog.is_configured():
        _configure_structlog(logging.WARNING, _renderers(sys.stderr, "auto"), sys.stderr)
    return cast("FilteringBoundLogger", structlog.get_logger().bind(service=service))


def _renderers(stream: TextIO, format: str) -> list[Processor]:
    if format == "text" or (format == "auto" and stream.isatty()):
        return [structlog.dev.ConsoleRenderer(colors=stream.isatty(), timestamp_key="at")]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]


def _configure_structlog(level: int, last: list[Processor], stream: TextIO) -> None:
    structlog.configure(
        processors=[*_SHARED, *last],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(file=stream),
        cache_logger_on_first_use=False,
    )
