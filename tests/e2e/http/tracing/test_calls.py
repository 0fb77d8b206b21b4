"""The trace context of calls by HTTP: a request's header is the parent of all that the call does."""

from __future__ import annotations

import http.client
import json
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

import stoker
from stoker.launch import spawn_local
from tests.e2e._cluster import session_root
from tests.e2e.http.tracing._collector import CLIENT, SERVER, WAIT_S, collector
from tests.services import until

if TYPE_CHECKING:
    from pathlib import Path

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TOKEN = "the-token-of-a-head-with-traces"


def seen(name: str) -> list[str]:
    """A function that is called by HTTP."""
    context = stoker.get_runtime_context()
    return [name, context.traceparent, context.tracestate]


def _of_trace(spans: list[Any]) -> list[Any]:
    return [one for one in spans if one.trace_id.hex() == PARENT[3:35]]


def call(url: str, name: str, **headers: str) -> list[str]:
    line = http.client.HTTPConnection(urlsplit(url).netloc, timeout=WAIT_S)
    body = json.dumps({"function": "seen", "args": [name], "namespace": "team"})
    own = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    line.request("POST", "/v1/calls", body, {**own, **headers})
    answer = line.getresponse()
    text = answer.read()
    line.close()
    assert answer.status == 200, text
    result: list[str] = json.loads(text)["result"]
    return result


@pytest.mark.parametrize("exports", [False, True])
def test_the_header_of_a_request_is_the_parent(tmp_path: Path, exports: bool) -> None:
    with collector() as made, session_root(tmp_path), pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_TOKEN", TOKEN)
        if exports:
            patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.url)
        cluster = spawn_local(embedded=False, num_cpus=2, num_gpus=0, gateway_port=0)
        try:
            info = cluster.wait_ready()
            with stoker.init(info.gcs_url, token=TOKEN, namespace="team", log_to_driver=False):
                stoker.register(seen)
            url = info.gateway_url
            given = call(url, "given", traceparent=PARENT, tracestate="vendor=x")
            plain = call(url, "plain")
            broken = call(url, "broken", traceparent="00-none")
            if not exports:
                assert given == ["given", PARENT, "vendor=x"]
                assert plain[1] == broken[1] == ""
                return
            ran = until(
                lambda: _of_trace(made.spans("seen", SERVER)), WAIT_S, "the call is exported"
            )
            (span,) = ran
            assert given[1] == f"{PARENT[:36]}{span.span_id.hex()}-01"
            assert span.trace_state == "vendor=x"
            sent = made.parent(span)
            request = made.parent(sent)
            assert (sent.kind, request.kind, request.name) == (CLIENT, SERVER, "POST /v1/calls")
            assert request.parent_span_id.hex() == PARENT[36:52]
            roots = {one.trace_id for one in made.spans("POST /v1/calls") if not one.parent_span_id}
            assert len(roots) == 2  # each request without a context begins a trace
        finally:
            cluster.stop()
