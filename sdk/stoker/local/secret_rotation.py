"""The rotation of the cluster's secret: the file that services follow, and the proof that they do.

Three steps, each done when every service says so: a next secret is accepted (``add``), it signs (``use``),
and the former one is refused (``finish``). Between two of them nothing is lost, whoever stops in between:
the stage is written into the file. Called by ``stoker token rotate``.
"""

from __future__ import annotations

import contextlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from stoker.runtime.net.http import HttpClient
from stoker_wire.errors import (
    ConflictError,
    DeadlineExceededError,
    NotFoundError,
    StartError,
    StokerError,
    UnauthorizedError,
)
from stoker_wire.http.auth import COMMENT, load_secrets, write_private
from stoker_wire.http.client.endpoints import urls_of
from stoker_wire.http.cluster_secret import ClusterSecret, secret_id
from stoker_wire.http.server.tokens import TokenSigner
from stoker_wire.messages.cluster import Node, NodeState
from stoker_wire.messages.control import SECRET_PATH, Leader, Page, SecretStatus, Token

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PAUSE_S = 0.5
SAY_AGAIN_S = 10.0
_CALL_S = 3.0
_ELECTED_S = 1.0
_AT_ONCE = 16
_LIFETIME_S = 600.0
_NEXT = f"{COMMENT} next: accepted already, and signs after `stoker token rotate --step use`"
_FORMER = f"{COMMENT} former: accepted until `stoker token rotate --finish`"


class Stage(StrEnum):
    """Meaning of the second line of a token file."""

    NONE = "none"
    NEXT = "next"
    FORMER = "former"
    UNKNOWN = "unknown"


class SecretFile:
    """The token file of services, as it is on this machine."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().resolve()
        self._read()

    def _read(self) -> None:
        self.secrets = load_secrets(self.path)
        self.stage = Stage.NONE
        if len(self.secrets) > 1:
            marks = [line[1:].split(":")[0].strip() for line in self._comments()]
            self.stage = Stage(marks[0]) if marks in (["next"], ["former"]) else Stage.UNKNOWN

    def _comments(self) -> list[str]:
        lines = self.path.read_text("ascii", "replace").splitlines()[1:]
        return [line for line in lines if line.startswith(COMMENT)]

    def add(self) -> None:
        """Add a next secret, unless there is one."""
        if self.stage is Stage.NONE:
            self._write(self.secrets[0], _NEXT, os.urandom(24).hex())
        elif self.stage is not Stage.NEXT:
            raise ConflictError(
                f"{self.path} has a second secret already\n"
                "end the rotation before with `stoker token rotate --finish`, or delete that line"
            )

    def use(self) -> None:
        """Make the next secret the one that signs, unless it is."""
        if self.stage is Stage.NONE:
            raise ConflictError(f"{self.path} has no next secret\nadd one with --step add")
        if self.stage is not Stage.FORMER:
            former, signs = self.secrets
            self._write(signs, _FORMER, former)

    def finish(self) -> None:
        """Leave out the former secret, if there is one."""
        if self.stage is Stage.NEXT:
            raise ConflictError(
                f"the second secret of {self.path} is the next one\n"
                "have it sign first: `stoker token rotate`, or --step use"
            )
        if self.stage is not Stage.NONE:
            self._write(self.secrets[0])

    def _write(self, *lines: str) -> None:
        try:
            write_private(self.path, "\n".join(lines) + "\n")
        except OSError as error:
            raise StartError(
                f"cannot write the token file {self.path}\n{error.strerror}\n"
                "where it is mounted from elsewhere, change it there"
            ) from None
        self._read()


class Peer(NamedTuple):
    """A service of the cluster, in words and by its URL."""

    name: str
    url: str


def operator_token(secret: str) -> str:
    """Return an admin's token for a while; the secret itself is not sent."""
    return TokenSigner(ClusterSecret((secret,))).operator(_LIFETIME_S)


class ClusterSecrets:
    """The services of a cluster, asked which secrets they have. ``say`` gets lines for who waits."""

    def __init__(self, address: str, timeout_s: float, say: Callable[[str], object]) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._say = say
        self._leading_gcs: str | None = None

    def peers(self, secret: str) -> list[Peer]:
        """Return the services that the gcs lists: replicas, leaders and living nodes."""
        token = operator_token(secret)
        gcs = HttpClient(self._address, token=token)
        found = dict.fromkeys(urls_of(self._address), "gcs")
        if self._leading_gcs is None:
            self._leading_gcs = ""  # a gcs that is alone is elected by nobody
            with contextlib.suppress(StokerError):
                self._leading_gcs = gcs.call(
                    "GET", "/v1/leaders/gcs", reply=Leader, timeout_s=_ELECTED_S
                ).url
        if self._leading_gcs:
            found.setdefault(self._leading_gcs, "gcs")
        scheduler = gcs.call("GET", "/v1/leaders/scheduler", reply=Leader).url
        found.setdefault(scheduler, "scheduler")
        peers = [Peer(f"the {name} at {url}", url) for url, name in found.items()]
        return peers + [
            Peer(f"node {node.node_id} at {node.url}", node.url)
            for node in gcs.items("/v1/nodes", Page[Node])
            if node.state is not NodeState.DEAD
        ]

    def people(self, secret: str) -> list[Token]:
        """Return the tokens of people that end when only ``secret`` is left."""
        gcs = HttpClient(self._address, token=operator_token(secret))
        return [
            one
            for one in gcs.items("/v1/tokens", Page[Token])
            if not one.revoked
            and one.signed_by != secret_id(secret)
            and (one.expires_at_s is None or one.expires_at_s > time.time())
        ]

    def check(self, secret: str) -> list[Peer]:
        """Raise ConflictError if a service could not follow; return all."""
        peers, token = self.peers(secret), operator_token(secret)
        problems = self._ask(peers, token, _fixed)
        if problems:
            raise ConflictError("nothing was changed\n" + "\n".join(problems))
        return peers

    def until_accepted(self, secret: str, signs: str) -> None:
        """Wait until every service accepts ``secret`` beside the one that ``signs``; prove it by use."""
        wanted = secret_id(secret)

        def missing(status: SecretStatus) -> str:
            return (
                "" if wanted in status.accepts else _fixed(status) or "has not got the next secret"
            )

        self._until("accepts the next secret", signs, missing)
        self._until("answers to the next secret", secret, lambda _: "")

    def until_used(self, secret: str) -> None:
        """Wait until ``secret`` signs everywhere, and every process of a job has a token of it."""
        self._until("signs by the new secret", secret, lambda status: _unused(status, secret))

    def check_used(self, secret: str) -> None:
        """Raise ConflictError if something would be locked out if ``secret`` were the only one."""
        problems = self._ask(
            self.peers(secret), operator_token(secret), lambda status: _unused(status, secret)
        )
        if problems:
            raise ConflictError("these would be locked out\n" + "\n".join(problems))

    def until_refused(self, former: str, secret: str) -> None:
        """Wait until every service has ``secret`` alone, and refuses ``former``."""

        def missing(status: SecretStatus) -> str:
            alone = status.accepts == (secret_id(secret),)
            return "" if alone else "still accepts the former secret"

        self._until("gives up the former secret", secret, missing)
        token = operator_token(former)
        for peer in self.peers(secret):
            try:
                HttpClient(peer.url, token=token).call("GET", SECRET_PATH, timeout_s=_CALL_S)
            except UnauthorizedError:
                continue
            except StokerError as error:
                raise ConflictError(
                    f"{peer.name} does not say whether it refuses\n{error}"
                ) from None
            raise ConflictError(f"{peer.name} still accepts the former secret")

    def _until(self, what: str, secret: str, missing: Callable[[SecretStatus], str]) -> None:
        token, began_s = operator_token(secret), time.monotonic()
        said_at_s = began_s
        while problems := self._ask(self.peers(secret), token, missing):
            now_s = time.monotonic()
            if now_s - began_s > self._timeout_s:
                raise DeadlineExceededError(
                    f"not every service {what} after {self._timeout_s:g} s\n"
                    + "\n".join(problems)
                    + "\ncopy the token file to where it is missing, and give this command again: it goes on"
                )
            if now_s - said_at_s >= SAY_AGAIN_S:
                said_at_s = now_s
                for one in problems:
                    self._say(f"waiting: {one}")
            time.sleep(PAUSE_S)

    def _ask(
        self, peers: list[Peer], token: str, missing: Callable[[SecretStatus], str]
    ) -> list[str]:
        """Return what is missing, a line for each service where something is."""

        def ask(peer: Peer) -> str:
            try:
                status = HttpClient(peer.url, token=token).call(
                    "GET", SECRET_PATH, reply=SecretStatus, timeout_s=_CALL_S
                )
            except UnauthorizedError:
                return f"{peer.name} refuses this secret: its token file is another"
            except NotFoundError:
                return f"{peer.name} is of an older version: upgrade it, or start it again by hand"
            except StokerError as error:
                return f"{peer.name} does not answer: {error.one_line}"
            what = missing(status)
            return f"{peer.name} {what}" if what else ""

        with ThreadPoolExecutor(_AT_ONCE) as threads:
            return [line for line in threads.map(ask, peers) if line]


def _fixed(status: SecretStatus) -> str:
    if not status.fixed:
        return ""
    return (
        "has its secret as text (STOKER_TOKEN), which changes with a restart only: "
        "start it with STOKER_TOKEN_FILE"
    )


def _unused(status: SecretStatus, secret: str) -> str:
    if status.signs != secret_id(secret):
        return _fixed(status) or "does not sign by the new secret"
    if status.behind:
        return f"waits for {', '.join(status.behind[:10])} to take a new token"
    return ""
