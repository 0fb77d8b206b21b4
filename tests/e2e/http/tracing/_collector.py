"""A collector of traces: OTLP over HTTP, on a free port, in threads of this process."""

from __future__ import annotations

import contextlib
import http.server
import threading
from typing import TYPE_CHECKING, Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_S = 40.0
CLIENT, SERVER, INTERNAL = 3, 2, 1


class Collector:
    """What has come: spans, each with the resource that it is of."""

    def __init__(self) -> None:
        self.url = ""
        self.headers: list[dict[str, str]] = []
        self._spans: list[tuple[Any, Any]] = []

    def take(self, body: bytes) -> None:
        """Decode a request, as every collector does."""
        request = ExportTraceServiceRequest()
        request.ParseFromString(body)
        for of_resource in request.resource_spans:
            for of_scope in of_resource.scope_spans:
                self._spans += [(of_resource.resource, span) for span in of_scope.spans]

    def spans(self, name: str = "", kind: int = 0) -> list[Any]:
        """Return those of a name and a kind."""
        return [
            span
            for _, span in list(self._spans)
            if name in ("", span.name) and kind in (0, span.kind)
        ]

    def one(self, name: str, kind: int = 0) -> Any:
        """Wait for the only span of a name and a kind."""
        until(lambda: self.spans(name, kind), WAIT_S, f"the span {name} is exported")
        (span,) = self.spans(name, kind)
        return span

    def parent(self, span: Any) -> Any:
        """Wait for the parent of a span."""

        def found() -> list[Any]:
            return [one for one in self.spans() if one.span_id == span.parent_span_id]

        until(found, WAIT_S, f"the parent of {span.name} is exported")
        (parent,) = found()
        assert parent.trace_id == span.trace_id
        return parent

    def resource_of(self, span: Any) -> dict[str, Any]:
        """Return the attributes of the process that a span is of."""
        (resource,) = [known for known, one in self._spans if one is span]
        return attributes(resource)


def attributes(of: Any) -> dict[str, Any]:
    """Return attributes as a mapping."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in of.attributes}


@contextlib.contextmanager
def collector() -> Iterator[Collector]:
    """A collector that takes all."""
    made = Collector()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            made.headers.append(dict(self.headers))
            made.take(body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    made.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
