"""The requests between a client outside of a cluster and its gateway, and their answers.

Out: ``CONNECT host:port`` (RFC 9110, 9.3.6) joins the connection with one to a process of the cluster. In:
``GET /v1/gateway/listen`` gives a process outside a port inside; for each connection that comes there the
gateway sends a line with an id, and the process takes it by ``GET /v1/gateway/accept``. Both upgrade
(RFC 9110, 7.8). All show a token; what is behind the answer is bytes of the two ends, and nothing else.
"""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import parse_qs, urlencode, urlsplit

import msgspec

from stoker_wire.errors import BadRequestError, UnavailableError
from stoker_wire.http.problems import error_of

GATEWAY_PATH = "/v1/gateway"
"""Answers that a gateway is here; a gcs has no such route."""
LISTEN_PATH = f"{GATEWAY_PATH}/listen"
ACCEPT_PATH = f"{GATEWAY_PATH}/accept"
METRICS_PATH = "/metrics"
"""Has those of the gateway; each service has its own at its own port."""
UPGRADE = "stoker-gateway"
URL_HEADER = "Stoker-Url"
"""Of the answer to a listen: the URL inside the cluster."""
HEAD_NBYTES = 1 << 14
"""The most that a head may have: of a request to a gateway and of its answer."""
HEAD_END = b"\r\n\r\n"
DIAL_S = 10.0
"""The gateway's own deadline for a connection to a process of the cluster."""


class GatewayInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of :data:`GATEWAY_PATH`."""

    service: str = "gateway"
    version: str
    has_drivers: bool = True
    """Whether drivers come by it; on loopback they reach all by themselves."""


class RequestHead(NamedTuple):
    """The first request of a connection, without its body. Names of ``headers`` are in lower case."""

    method: str
    target: str
    headers: dict[str, str]

    @property
    def path(self) -> str:
        """The path of the target, without its query."""
        return self.target.partition("?")[0]

    @property
    def query(self) -> dict[str, str]:
        """The query's parameters, of each the last."""
        return {name: texts[-1] for name, texts in parse_qs(urlsplit(self.target).query).items()}

    @property
    def token(self) -> str:
        """The bearer token: that for the gateway, or the request's own; empty if there is none."""
        header = self.headers.get("proxy-authorization") or self.headers.get("authorization", "")
        return header[7:].strip() if header[:7].lower() == "bearer " else ""


def parse_request(head: bytes) -> RequestHead:
    """Return a request's head, which ends before ``HEAD_END``; BadRequestError if it is no HTTP/1.1."""
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise BadRequestError("this port speaks HTTP/1.1\nthe first line is no request of that")
    return RequestHead(words[0], words[1], dict(_fields(lines)))


def connect_request(host: str, port: int, token: str) -> bytes:
    """Return the request that joins a connection with ``host``:``port`` inside."""
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return (
        f"CONNECT {where} HTTP/1.1\r\nHost: {where}\r\nProxy-Authorization: Bearer {token}\r\n\r\n"
    ).encode()


def upgrade_request(path: str, token: str, host: str, **query: str | int) -> bytes:
    """Return the request that makes a connection one of ``path``'s kind."""
    return (
        f"GET {path}?{urlencode(query)} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {token}\r\n"
        f"Connection: Upgrade\r\nUpgrade: {UPGRADE}\r\n\r\n"
    ).encode()


class AnswerReader:
    """A reader of a gateway's answer, which is given the bytes as they come."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._data = b""
        self.headers: dict[str, str] = {}

    def feed(self, data: bytes) -> bytes | None:
        """Return what came behind the answer, once it is whole and says yes; None until then.

        No ``data`` is the end of the connection. Raises the error that the gateway sent;
        UnavailableError if that is no answer of a gateway.
        """
        self._data += data
        head, found, rest = self._data.partition(HEAD_END)
        if not found:
            if data and len(self._data) <= HEAD_NBYTES:
                return None
            raise UnavailableError(f"the gateway at {self.url} closed the connection unanswered")
        first, *lines = head.decode("latin-1").split("\r\n")
        self.headers = dict(_fields(lines))
        status = first.split(" ")[1:2]
        if not status or not status[0].isdecimal():
            raise UnavailableError(f"what answers at {self.url} is no gateway: {first[:100]!r}")
        if status[0] in ("200", "101"):
            return rest
        length = self.headers.get("content-length", "0")
        if data and length.isdecimal() and len(rest) < min(int(length), HEAD_NBYTES):
            return None
        raise error_of(rest, status=int(status[0]), source=f"the gateway at {self.url}")


def _fields(lines: list[str]) -> list[tuple[str, str]]:
    pairs = (line.partition(":") for line in lines if line)
    return [(name.strip().lower(), text.strip()) for name, _, text in pairs]
