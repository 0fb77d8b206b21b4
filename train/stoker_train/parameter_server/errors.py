"""The errors of parameter servers, beside those of bad arguments (``BadRequestError``, ``NotFoundError``).

Raised by :mod:`stoker_train.parameter_server`; nothing here talks to anybody.
"""

from __future__ import annotations

from stoker.exceptions import StokerError


class ParameterServerError(StokerError, RuntimeError):
    """A request to parameter servers failed; the text says whether a push was applied."""

    code = "parameter_server_failed"


class ServerLostError(ParameterServerError, ConnectionError):
    """A parameter server is gone for good; ``extra`` has ``server`` (its number) and ``actor``."""

    code = "parameter_server_lost"
    status = 503


class ServerTimeoutError(ParameterServerError, TimeoutError):
    """Servers did not answer in time; ``extra["servers"]`` are their numbers."""

    code = "parameter_server_timeout"
    status = 504


class WorkerTimeoutError(ParameterServerError, TimeoutError):
    """Other workers did not come in time; ``extra["ranks"]`` are those that were waited for."""

    code = "parameter_server_worker_timeout"
    status = 504
