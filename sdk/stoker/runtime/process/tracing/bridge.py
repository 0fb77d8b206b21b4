"""The current context of OpenTelemetry's own API, for programs that have imported it.

Imported where ``opentelemetry.trace`` is in this process already: nothing of Stoker loads it.
"""

from __future__ import annotations

from typing import Any

from opentelemetry import context, trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from stoker_wire.http.trace_context import joined, split

_propagator = TraceContextTextMapPropagator()


def current() -> str:
    """Return OpenTelemetry's current context, '' for none."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier)
    return joined(carrier.get("traceparent", ""), carrier.get("tracestate", ""))


def attach(given: str) -> Any:
    """Make a context OpenTelemetry's current one; return what :func:`detach` takes."""
    parent, state = split(given)
    carrier = {"traceparent": parent, "tracestate": state}
    return context.attach(_propagator.extract(carrier, context.Context()))


def detach(token: Any) -> None:
    """End what :func:`attach` began."""
    context.detach(token)


def provide(endpoint: str, headers: dict[str, str]) -> None:
    """Export the spans of OpenTelemetry's API as well, unless the program has set its own provider."""
    if not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:  # not installed (the extra "tracing")
        return
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint, headers=headers)))
    trace.set_tracer_provider(provider)


def flush(within_s: float) -> None:
    """Have the provider send what it has."""
    force = getattr(trace.get_tracer_provider(), "force_flush", None)
    if force is not None:
        force(int(within_s * 1000))
