"""Spans by hand against OpenTelemetry's own decoder."""

from __future__ import annotations

from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from stoker.runtime.process.tracing.context import call_span_id, run_span_id
from stoker.runtime.process.tracing.otlp import CallData, Encoder, Kind, Problem, SpanData

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def decoded(*spans: SpanData | CallData) -> list[Any]:
    request = ExportTraceServiceRequest()
    request.ParseFromString(Encoder({"service.name": "shop", "process.pid": 7}, "1").request(spans))
    (of_resource,) = request.resource_spans
    (of_scope,) = of_resource.scope_spans
    assert [one.key for one in of_resource.resource.attributes] == ["service.name", "process.pid"]
    assert (of_scope.scope.name, of_scope.scope.version) == ("stoker", "1")
    return list(of_scope.spans)


def call(
    kind: Kind, trace: str, task_id: str = "t_1", attempt: int = 0, problem: Problem | None = None
) -> CallData:
    return (kind, trace, task_id, attempt, "wörk", 10.0, 11.5, "job_1", "a_1", problem)


def attributes(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def test_the_short_way_says_the_same_as_the_long_one() -> None:
    for task_id in ("t_1", "t_0123456789abcdef1f"):
        calls = [
            call(kind, f"{plus}{TRACE}{state}", task_id)
            for kind in (Kind.CLIENT, Kind.SERVER)
            for plus in ("", "+")
            for state in ("", " vendor=x")
        ]
        problem = Problem("ValueError", "no", "trace")
        marked = decoded(*((*one[:-1], problem) for one in calls))
        for short, long in zip(decoded(*calls), marked, strict=True):
            assert long.status.code == 2 and long.events[0].name == "exception"
            del long.attributes[-1:], long.events[:]
            long.ClearField("status")
            assert short == long


def test_ids_times_and_parents_of_a_call() -> None:
    sent, ran = decoded(call(Kind.CLIENT, f"+{TRACE}"), call(Kind.SERVER, f"+{TRACE}"))
    assert sent.trace_id.hex() == ran.trace_id.hex() == TRACE[3:35]
    assert sent.parent_span_id.hex() == TRACE[36:52]
    assert sent.span_id.hex() == call_span_id("t_1") == ran.parent_span_id.hex()
    assert ran.span_id.hex() == run_span_id("t_1", 0)
    assert (ran.start_time_unix_nano, ran.end_time_unix_nano) == (10 * 10**9, 115 * 10**8)
    assert (sent.kind, ran.kind, ran.name) == (3, 2, "wörk")
    assert (sent.flags, ran.flags) == (0x101, 0x301)
    assert attributes(ran) == {
        "rpc.system": "stoker", "rpc.method": "wörk", "stoker.job.id": "job_1",
        "stoker.actor.id": "a_1", "stoker.task.id": "t_1",
    }  # fmt: skip


def test_attempts_have_ids_of_their_own() -> None:
    spans = decoded(*(call(Kind.SERVER, f"+{TRACE}", attempt=number) for number in range(4)))
    assert len({one.span_id for one in spans}) == 4
    assert len({one.parent_span_id for one in spans}) == 1


def test_what_is_not_sampled_or_no_context_is_left_out() -> None:
    assert decoded(call(Kind.SERVER, TRACE[:-2] + "00"), call(Kind.SERVER, "nonsense")) == []


def test_values_of_attributes_keep_their_types() -> None:
    given = {"a": True, "b": -3, "c": 2.5, "d": "ü", "e": 2**62, "f": "\ud800"}
    span = SpanData(TRACE, "b7ad6b7169203331", "x", Kind.INTERNAL, 1, 2, attributes=given)
    (root,) = decoded(span._replace(is_root=True))
    assert attributes(root) == {**given, "f": "?"}
    assert root.parent_span_id == b""
