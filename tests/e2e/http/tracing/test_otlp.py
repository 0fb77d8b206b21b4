"""Spans of calls at a collector: their parents, their errors, and what is not there without one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import stoker
from tests.e2e._cluster import embedded
from tests.e2e.http.tracing._collector import (
    CLIENT,
    INTERNAL,
    SERVER,
    WAIT_S,
    Collector,
    attributes,
    collector,
)
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collector]:
    """A driver and a cluster that export to a collector."""
    with collector() as made, pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_OTLP_ENDPOINT", made.url)
        patch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=a%20b")
        patch.setenv("OTEL_SERVICE_NAME", "shop")
        with embedded(tmp_path_factory.mktemp("traced"), num_cpus=3, num_gpus=0):
            yield made


@stoker.remote(num_cpus=0)
def leaf(name: str) -> str:
    with stoker.profile(f"span of {name}", size=3):
        return stoker.get_runtime_context().traceparent


@stoker.remote(num_cpus=0)
class Shop:
    def sell(self) -> Any:
        return stoker.get(leaf.options(name="by the actor").remote("actor"))

    async def sell_async(self) -> Any:
        return await leaf.options(name="by the async method").remote("async")


@stoker.remote(num_cpus=0)
def branch(shop: Any) -> list[str]:
    nested = leaf.options(name="nested").remote("nested")
    return stoker.get([nested, shop.sell.remote()])


def test_parents_go_from_the_driver_to_the_last_call(traced: Collector) -> None:
    shop = Shop.remote()
    with stoker.profile("checkout", basket=7):
        inside, _ = stoker.get(branch.remote(shop))
        by_async = shop.sell_async.remote()
        stoker.get(by_async)
    chain = (
        ("span of nested", INTERNAL), ("nested", SERVER), ("nested", CLIENT), ("branch", SERVER),
        ("branch", CLIENT), ("checkout", INTERNAL),
    )  # fmt: skip
    span = traced.one("span of nested")
    for name, kind in chain[1:]:
        child, span = span, traced.parent(span)
        assert (span.name, span.kind) == (name, kind)
        assert span.start_time_unix_nano <= child.start_time_unix_nano + 50_000_000
    assert attributes(span) == {"basket": 7}
    nested = traced.one("nested", SERVER)
    assert inside == f"00-{nested.trace_id.hex()}-{traced.one('span of nested').span_id.hex()}-01"
    for name, by in (("by the actor", "Shop.sell"), ("by the async method", "Shop.sell_async")):
        caller = traced.parent(traced.one(name, CLIENT))
        assert (caller.name, caller.kind) == (by, SERVER)
        assert traced.parent(caller).kind == CLIENT
        assert attributes(caller)["stoker.actor.id"].startswith("a_")
    assert len({one.trace_id for one in traced.spans()}) == 1
    assert traced.resource_of(nested)["service.name"] == "shop"
    assert traced.headers[0]["x-team"] == "a b"


def test_what_fails_is_marked_with_its_exception(traced: Collector) -> None:
    @stoker.remote(num_cpus=0, max_retries=1, retry_exceptions=True, name="fails")
    def fails() -> None:
        raise KeyError("no such thing")

    with pytest.raises(KeyError):
        stoker.get(fails.remote())
    until(lambda: len(traced.spans("fails", SERVER)) == 2, WAIT_S, "both attempts are exported")
    call = traced.one("fails", CLIENT)
    first, second = sorted(traced.spans("fails", SERVER), key=lambda one: one.start_time_unix_nano)
    assert first.parent_span_id == second.parent_span_id == call.span_id
    assert len({first.span_id, second.span_id, call.span_id}) == 3
    assert attributes(second)["stoker.task.attempt"] == 1
    for span in (first, second, call):
        assert span.status.code == 2
        (event,) = span.events
        assert event.name == "exception"
        assert attributes(event)["exception.type"].endswith("KeyError")
        assert "no such thing" in attributes(event)["exception.message"]
    assert "fails" in attributes(second.events[0])["exception.stacktrace"]


def test_a_span_of_opentelemetrys_own_api_is_a_parent_and_a_child(traced: Collector) -> None:
    @stoker.remote(num_cpus=0, name="with the api")
    def uses_api() -> str:
        from opentelemetry import trace

        with trace.get_tracer("mine").start_as_current_span("by the api"):
            stoker.get(leaf.options(name="below the api").remote("api"))
        return trace.__name__

    stoker.get(uses_api.remote())  # imports it
    stoker.get(uses_api.remote())
    until(lambda: traced.spans("by the api"), WAIT_S, "the API's span is exported")
    (span,) = traced.spans("by the api")
    assert traced.parent(span).name == "with the api"
    below = [one for one in traced.spans("below the api", CLIENT) if one.trace_id == span.trace_id]
    assert span.span_id in {one.parent_span_id for one in below}
