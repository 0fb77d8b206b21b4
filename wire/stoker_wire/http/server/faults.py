"""Fault injection for HTTP, by route: what an unreliable network and a slow peer do, on purpose.

``STOKER_FAULTS`` names routes and the probability of each fault; empty, which it is unless somebody
rehearses faults, nothing of this runs. A rule is ``METHOD PATH: FAULT P, ...``; several are
separated by ``;`` and the first that names a route holds for it. ``*`` stands for any method, and in
a path, which is written as in ``/openapi.json``, for any text::

    POST /v1/leases: drop 0.05, delay 0.2@0.1, double 0.02; * /v1/*: drop-reply 0.01

``drop`` closes the connection without an answer, before or after the handler ran, one as likely as
the other; ``drop-request`` and ``drop-reply`` are one of them. ``delay S@P`` waits S seconds first.
``double`` runs the handler twice and answers with what the second run says: the reply to the first
request was lost, and the client sent it again. It is left out where no client would do that: for
streams, for reads, and for a POST without an Idempotency-Key.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from stoker_wire.errors import BadRequestError, StokerError

if TYPE_CHECKING:
    from aiohttp import web

    from stoker_wire.http.server.request import BoundRoute, Request

Dispatch = Callable[["Request"], Awaitable["web.StreamResponse"]]

_SHARES = ("drop", "drop-request", "drop-reply", "double")
_USAGE = (
    "write it like 'POST /v1/leases: drop 0.05, delay 0.2@0.1, double 0.02; * /v1/*: drop 0.01'"
)


@dataclass(frozen=True, slots=True)
class FaultRule:
    """The faults of the routes that ``method`` and ``path`` name, as probabilities."""

    method: str
    path: str
    drop_request: float = 0.0
    drop_reply: float = 0.0
    double: float = 0.0
    delay: float = 0.0
    delay_s: float = 0.0

    def names(self, route: BoundRoute) -> bool:
        """Return whether this rule is about ``route``."""
        return self.method in ("*", route.method) and fnmatchcase(route.path, self.path)


def parse_faults(text: str) -> tuple[FaultRule, ...]:
    """Return the rules of ``STOKER_FAULTS``; BadRequestError shows the part that is none."""
    return tuple(_rule(part.strip()) for part in text.split(";") if part.strip())


def _rule(text: str) -> FaultRule:
    where, colon, what = text.rpartition(":")
    method, _, path = where.strip().partition(" ")
    if not colon or not path.strip().startswith("/"):
        raise _bad(text, "it names no METHOD /path")
    shares: dict[str, float] = {}
    delay_s = 0.0
    for part in what.split(","):
        name, _, amount = part.strip().partition(" ")
        if name not in (*_SHARES, "delay"):
            raise _bad(text, f"{name!r} is none of {', '.join((*_SHARES, 'delay'))}")
        try:
            if name == "delay":
                seconds, _, share = amount.partition("@")
                delay_s, shares[name] = float(seconds), float(share or 1)
            else:
                shares[name] = float(amount)
        except ValueError:
            raise _bad(text, f"{amount!r} is no number") from None
    if delay_s < 0 or not all(0 <= share <= 1 for share in shares.values()):
        raise _bad(text, "a probability is from 0 to 1, and a delay is not negative")
    half = shares.get("drop", 0.0) / 2
    return FaultRule(
        method,
        path.strip(),
        drop_request=min(1.0, half + shares.get("drop-request", 0.0)),
        drop_reply=min(1.0, half + shares.get("drop-reply", 0.0)),
        double=shares.get("double", 0.0),
        delay=shares.get("delay", 0.0),
        delay_s=delay_s,
    )


def _bad(text: str, why: str) -> BadRequestError:
    return BadRequestError(
        f"STOKER_FAULTS holds {text!r}, which is no rule\n{why}; {_USAGE}", field="STOKER_FAULTS"
    )


def with_faults(rules: tuple[FaultRule, ...], seed: str, dispatch: Dispatch) -> Dispatch:
    """Return ``dispatch`` with the faults of ``rules``, drawn by ``seed``."""
    dice = random.Random(seed)

    async def faulty(request: Request) -> web.StreamResponse:
        rule = next((rule for rule in rules if rule.names(request.route)), None)
        if rule is None:
            return await dispatch(request)
        # All are drawn for every request, so that one more kind of fault moves no other.
        delay, lost, twice = (dice.random() for _ in range(3))
        if delay < rule.delay:
            await asyncio.sleep(rule.delay_s)
        if lost < rule.drop_request:
            raise _cut(request)
        if twice < rule.double and _is_sent_again(request):
            await request.read()
            first = copy.copy(request)
            with contextlib.suppress(StokerError):
                response = await dispatch(first)
                if first.response is not None:  # its bytes are on their way
                    return response
        response = await dispatch(request)
        if lost < rule.drop_request + rule.drop_reply and request.response is None:
            raise _cut(request)
        return response

    return faulty


def _is_sent_again(request: Request) -> bool:
    if request.route.stream:
        return False
    if request.route.method == "POST":
        return "Idempotency-Key" in request.http.headers
    return request.route.method in ("PUT", "DELETE")


def _cut(request: Request) -> ConnectionResetError:
    """Break the connection; return what tells the dispatcher that there is nobody to answer."""
    if request.http.transport is not None:
        request.http.transport.abort()
    return ConnectionResetError("a fault of STOKER_FAULTS")
