"""The export of spans survives what it is told: addresses, contexts and spans that are none."""

from __future__ import annotations

import pytest

import stoker
from stoker.runtime.process.tracing import tracer as tracer_module
from stoker.runtime.process.tracing.context import TRACES, Traces
from stoker.runtime.process.tracing.exporter import Destination, destination
from stoker.runtime.process.tracing.otlp import Encoder, Kind, SpanData
from stoker.runtime.process.tracing.tracer import Tracer

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The batches that a tracer sends."""
    bodies: list[bytes] = []
    monkeypatch.setattr(
        tracer_module.Sender, "send", lambda _, body, within_s=None: bodies.append(body)
    )
    return bodies


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:port", "http://127.0.0.1:99999", "http://[::1", "ftp://here", "here"]
)
def test_what_is_no_url_of_a_collector_exports_nothing_and_stops_nobody(url: str) -> None:
    to = destination({}, url)
    assert to is not None and "is no URL of a collector" in to.problem
    TRACES.close(0.0)
    tracer_module.configure({}, url, {})
    assert TRACES.tracer is None


@pytest.mark.parametrize("trace", ["+", "nonsense", "+nonsense"])
def test_a_call_with_no_valid_context_has_none(trace: str) -> None:
    assert Traces().of_call(trace, "t_1", 0) == ""
    encoder = Encoder({}, "1")
    call = (Kind.SERVER, trace, "t_1", 0, "f", 1.0, 2.0, "job_1", "", None)
    assert encoder.request([call]) == encoder.request([])


def test_a_span_that_cannot_be_encoded_does_not_end_the_export(sent: list[bytes]) -> None:
    tracer = Tracer(Destination("http://127.0.0.1:4318/v1/traces"), {})
    good = SpanData(TRACE, "b7ad6b7169203331", "good", Kind.INTERNAL, 1.0, 2.0)
    assert tracer._send([good._replace(started_at_s=-1.0)], None)
    assert (tracer.dropped, sent) == (1, [])
    tracer.add(good)
    tracer.close(20.0)
    assert len(sent) == 1 and b"good" in sent[0]


def test_a_part_that_was_in_a_trace_once_may_be_in_none_later(sent: list[bytes]) -> None:
    part = stoker.profile("part")
    environ = {"TRACEPARENT": TRACE}
    try:
        tracer_module.configure(environ, "http://127.0.0.1:4318", {})
        with part:
            assert TRACES.now() != TRACE
        TRACES.of_process = ""
        for _ in range(2):
            with part:
                assert TRACES.now() == ""
    finally:
        TRACES.close(20.0)
    assert b"".join(sent).count(b"part") == 1
