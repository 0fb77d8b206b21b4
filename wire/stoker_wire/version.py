"""The version of this build, the protocol it speaks, and the check that another one fits it.

Read by every client and server on each request. The protocol moves more slowly than the version: a
minor step adds fields or routes, a major step breaks. This module only compares; the server refuses.
"""

from __future__ import annotations

from stoker_wire.errors import BadRequestError, ProtocolError

VERSION = "0.1.0"
PROTOCOL: tuple[int, int] = (4, 0)
PROTOCOL_HEADER = "Stoker-Protocol"
PROTOCOL_TEXT = f"{PROTOCOL[0]}.{PROTOCOL[1]}"


def check_protocol(header: str | None, *, peer: str, service: str) -> None:
    """Raise ProtocolError if ``header`` is too far from ours; no header (curl) is accepted.

    Fits: the same major number, and minor numbers at most one apart.
    """
    if header is None or header == PROTOCOL_TEXT:
        return
    theirs = parse_protocol(header)
    if theirs[0] == PROTOCOL[0] and abs(theirs[1] - PROTOCOL[1]) <= 1:
        return
    older = peer if theirs < PROTOCOL else service
    raise ProtocolError(
        f"{peer} speaks protocol {header}, {service} speaks {PROTOCOL_TEXT}\n"
        f"components may be one minor version apart: upgrade {older}",
        extra={"theirs": header, "ours": PROTOCOL_TEXT},
    )


def is_newer(header: str | None) -> bool:
    """Return whether the sender of ``header`` speaks a newer protocol than this process."""
    if header is None or header == PROTOCOL_TEXT:
        return False
    try:
        return parse_protocol(header) > PROTOCOL
    except BadRequestError:
        return False


def parse_protocol(header: str) -> tuple[int, int]:
    """Return ``"2.0"`` as ``(2, 0)``."""
    major, dot, minor = header.partition(".")
    if not (dot and major.isdecimal() and minor.isdecimal() and len(header) <= 20):
        raise BadRequestError(
            f"{PROTOCOL_HEADER}: expected '<major>.<minor>', got {header[:40]!r}",
            field=PROTOCOL_HEADER,
        )
    return int(major), int(minor)
