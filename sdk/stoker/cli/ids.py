"""Ids by their prefix: resolved where a command takes one, completed by the shell.

The gcs looks prefixes up (``GET /v1/ids``); nothing is listed here. Completion has a short deadline and
is silent when nobody answers.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from stoker_wire.errors import BadRequestError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from stoker.runtime.net.http import HttpClient
    from stoker_wire.messages.control import IdMatch, IdMatches

    _StrType = click.ParamType[str]
else:
    _StrType = click.ParamType  # generic only in newer versions of click

STEMS = {
    "node": "n_",
    "job": "job_",
    "task": "t_",
    "actor": "a_",
    "worker": "w_",
    "placement group": "pg_",
}
SHOWN = 10
_COMPLETED = 50
_COMPLETE_S = 1.0


class Id(_StrType):
    """Argument type: an id of one of these kinds, or a prefix of one."""

    name = "id"

    def __init__(self, *kinds: str) -> None:
        self._kinds = kinds

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the ids of the cluster with this prefix, each with its state and name."""
        from click.shell_completion import CompletionItem

        matches = known_ids(ctx, incomplete, self._kinds)
        return [CompletionItem(m.id, help=_about(m)) for m in matches]


def _about(match: IdMatch) -> str:
    """Return state and name in one short line: what a shell reads ends at a line's end."""
    return " ".join(f"{match.state} {match.name}".split())[:60]


def known_ids(ctx: click.Context, incomplete: str, kinds: tuple[str, ...]) -> list[IdMatch]:
    """Return the ids with this prefix; silently none if the cluster does not answer in time."""
    matches: list[IdMatch] = []
    try:
        client = client_of(ctx)
        deadline_s = time.monotonic() + _COMPLETE_S
        for kind in kinds:
            stem = STEMS[kind]
            left_s = max(deadline_s - time.monotonic(), 0.01)
            if stem.startswith(incomplete) or incomplete.startswith(stem):
                prefix = max(incomplete, stem, key=len)
                matches += _ask(client, prefix, _COMPLETED, left_s).matches
    except Exception:  # whatever is wrong, a shell that completes shows no error
        return matches
    return matches


def client_of(ctx: click.Context) -> HttpClient:
    """Return a client of the cluster that the command line so far names."""
    from stoker.cli.options import http_client

    given: dict[str, Any] = ctx.params
    return http_client(given.get("address"), given.get("token"))


def _ask(client: HttpClient, prefix: str, limit: int, timeout_s: float | None) -> IdMatches:
    from stoker_wire.messages.control import IdMatches

    query = {"prefix": prefix, "limit": limit}
    return client.call("GET", "/v1/ids", reply=IdMatches, query=query, timeout_s=timeout_s)


def resolve_id(client: HttpClient, given: str) -> str:
    """Return the one id that begins with ``given``.

    A prefix of no id is returned as it is: the request that uses it reports best what is missing.
    BadRequestError lists the ids if there are several.
    """
    if not any(given.startswith(stem) for stem in STEMS.values()) or len(given) > 200:
        return given
    answer = _ask(client, given, SHOWN, None)
    ids = [match.id for match in answer.matches]
    if not ids or given in ids:
        return given
    if len(ids) == 1:
        return ids[0]
    shown = ", ".join(ids) + (", and more" if answer.more else "")
    raise BadRequestError(f"several ids begin with {given}\n{shown}\ngive more of the one you mean")
