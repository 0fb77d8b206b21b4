"""The place where spans go, OTLP over HTTP as OpenTelemetry's own variables say, and the sending."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

_TRACES = "/v1/traces"
_PROTOBUF = "http/protobuf"
_TIMEOUT_S = 10.0
_RETRIED = frozenset({408, 429, 502, 503, 504})


class ExportError(Exception):
    """A batch was not taken; ``retry``: it may be later."""

    def __init__(self, text: str, *, retry: bool) -> None:
        super().__init__(text)
        self.retry = retry


@dataclass(frozen=True, slots=True)
class Destination:
    """A collector, and how it is asked."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = _TIMEOUT_S
    certificate: str = ""
    ratio: float = 1.0
    """The share of new traces that are recorded."""
    problem: str = ""
    """Why nothing is exported although it was asked for."""


def destination(environ: Mapping[str, str], endpoint: str = "") -> Destination | None:
    """Return where the spans of a process go by ``endpoint`` and OpenTelemetry's variables; None: nowhere."""

    def of_traces(name: str) -> str:
        specific = environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}", "")
        return specific or environ.get(f"OTEL_EXPORTER_OTLP_{name}", "")

    url = environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
    base = endpoint or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    if endpoint or not url:
        url = base.rstrip("/") + _TRACES if base else ""
    off = environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if not url or off or environ.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return None
    protocol = of_traces("PROTOCOL") or _PROTOBUF
    problem = ""
    if protocol != _PROTOBUF:
        problem = f"the protocol is {protocol}: set OTEL_EXPORTER_OTLP_PROTOCOL to {_PROTOBUF}"
    elif not _is_url(url):
        problem = f"{url[:200]!r} is no URL of a collector, as http://127.0.0.1:4318"
    return Destination(
        url,
        _headers(of_traces("HEADERS")),
        _seconds(of_traces("TIMEOUT")),
        of_traces("CERTIFICATE"),
        _ratio(environ),
        problem,
    )


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of the port, or the brackets of an IPv6 address
        return False


def _headers(text: str) -> dict[str, str]:
    pairs = (one.partition("=") for one in text.split(",") if "=" in one)
    return {unquote(name.strip()): unquote(value.strip()) for name, _, value in pairs}


def _seconds(text: str) -> float:
    """Return a timeout, which OpenTelemetry counts in milliseconds (its Python SDK in seconds)."""
    try:
        given = float(text)
    except ValueError:
        return _TIMEOUT_S
    return min(max(given / 1000 if given >= 100 else given, 0.1), 60.0)


def _ratio(environ: Mapping[str, str]) -> float:
    """Return the share of new traces that ``OTEL_TRACES_SAMPLER`` wants."""
    sampler = environ.get("OTEL_TRACES_SAMPLER", "").removeprefix("parentbased_")
    if sampler == "always_off":
        return 0.0
    if sampler != "traceidratio":
        return 1.0
    try:
        return min(max(float(environ.get("OTEL_TRACES_SAMPLER_ARG", "1")), 0.0), 1.0)
    except ValueError:
        return 1.0


class Sender:
    """The connection to a collector (one thread)."""

    def __init__(self, to: Destination) -> None:
        self._to = to
        parts = urlsplit(to.url)
        self._path = parts.path or "/"
        self._host, self._port = parts.hostname or "", parts.port
        self._tls = parts.scheme == "https"
        self._connection: http.client.HTTPConnection | None = None

    def send(self, body: bytes, timeout_s: float | None = None) -> None:
        """Send a batch; raises ExportError."""
        connection = self._connection or self._connect()
        timeout_s = min(timeout_s or self._to.timeout_s, self._to.timeout_s)
        connection.timeout = timeout_s
        if connection.sock is not None:
            connection.sock.settimeout(timeout_s)
        headers = {"Content-Type": "application/x-protobuf", **self._to.headers}
        try:
            connection.request("POST", self._path, body, headers)
            answer = connection.getresponse()
            text = answer.read(1000)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            raise ExportError(f"{type(error).__name__}: {error}", retry=True) from None
        if not 200 <= answer.status < 300:
            self.close()
            said = text.decode(errors="replace")[:200]
            raise ExportError(f"{answer.status} {said}", retry=answer.status in _RETRIED)
        if not answer.isclosed():
            self.close()  # the rest of a long answer is nothing to wait for

    def _connect(self) -> http.client.HTTPConnection:
        if self._tls:
            try:
                context = ssl.create_default_context(cafile=self._to.certificate or None)
            except OSError as error:
                raise ExportError(f"{self._to.certificate}: {error}", retry=False) from None
            self._connection = http.client.HTTPSConnection(self._host, self._port, context=context)
        else:
            self._connection = http.client.HTTPConnection(self._host, self._port)
        return self._connection

    def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
