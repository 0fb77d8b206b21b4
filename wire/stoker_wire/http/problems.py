"""Errors as RFC 9457 problem documents, both ways: the only translation between the two.

Called by whatever answers HTTP (error -> problem) and by the clients (problem -> error), so that an
error is raised far away as the class that it had here.
"""

from __future__ import annotations

from typing import Any

import msgspec

from stoker_wire.errors import InternalError, StokerError, UnavailableError, error_for
from stoker_wire.http.codec import PROBLEM, encode_json

ERROR_PAGES = "/errors/"
"""Where every service has the pages of the codes, for everybody."""
_TITLES = {
    400: "Bad request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not found",
    405: "Method not allowed",
    409: "Conflict",
    410: "Gone",
    413: "Content too large",
    415: "Unsupported media type",
    422: "Unprocessable",
    429: "Too many requests",
    500: "Internal error",
    503: "Unavailable",
    504: "Deadline exceeded",
    507: "Insufficient storage",
}


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error as every Stoker service sends it (``application/problem+json``).

    ``code`` is stable across versions; ``docs`` is the path of its page at the service that sends this;
    ``retryable`` says whether the same call may succeed later; ``field`` names the input at fault;
    ``explain`` is a path that tells why something waits.
    """

    type: str = ""
    title: str = ""
    # Defaults that are never sent: what has its default is left out.
    status: int = 0
    detail: str = ""
    code: str = ""
    docs: str = ""
    retryable: bool = False
    field: str | None = None
    explain: str | None = None
    request_id: str | None = None
    extra: dict[str, Any] = {}


def problem_of(error: StokerError, *, request_id: str | None, status: int | None = None) -> Problem:
    """Return the document of ``error``; ``status`` overrides the one of its class."""
    status = status or error.status
    return Problem(
        type=f"urn:stoker:error:{error.code}",
        title=_TITLES.get(status, "Error"),
        status=status,
        detail=error.message,
        code=error.code,
        docs=f"{ERROR_PAGES}{error.code}",
        retryable=error.retryable,
        field=error.field,
        explain=error.explain,
        request_id=request_id,
        extra=error.extra,
    )


def problem_response(
    error: StokerError, *, request_id: str | None = None, status: int | None = None
) -> tuple[int, str, bytes]:
    """Return the status, content type and body of the reply that carries ``error``."""
    problem = problem_of(error, request_id=request_id, status=status)
    return problem.status, PROBLEM, encode_json(problem)


def error_of(raw: bytes, *, status: int, source: str) -> StokerError:
    """Return the error that a reply with ``status`` carries; ``source`` says who replied.

    A body that is no problem document (a proxy's page) becomes UnavailableError for 502, 503 and
    504, which may be retried, else InternalError.
    """
    try:
        problem = msgspec.json.decode(raw, type=Problem)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        text = raw[:200].decode("utf-8", "replace").strip()
        cls = UnavailableError if status in (502, 503, 504) else InternalError
        return cls(f"{source} answered {status}: {text}")
    return error_for(
        problem.code or InternalError.code,
        problem.detail,
        field=problem.field,
        explain=problem.explain,
        extra=problem.extra,
    )
