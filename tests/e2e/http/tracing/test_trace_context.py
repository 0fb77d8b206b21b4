"""The trace context of drivers as others start them, and what becomes of spans that nobody takes."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

import pytest

from tests.e2e._cluster import cli, head, run_driver
from tests.e2e.http.tracing._collector import CLIENT, INTERNAL, WAIT_S, collector

if TYPE_CHECKING:
    from pathlib import Path

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_process_joins_the_trace_of_whoever_started_it(tmp_path: Path) -> None:
    program = """
        import os, stoker
        stoker.init(log_to_driver=False)
        f = stoker.remote(num_cpus=0, name="{0}")(lambda: stoker.get_runtime_context().traceparent)
        print(stoker.get(f.remote()), stoker.get_runtime_context().tracestate)
    """
    with collector() as made, head(tmp_path, num_cpus=2) as cluster:
        given = {"TRACEPARENT": PARENT, "TRACESTATE": "vendor=x"}
        plain = run_driver(cluster, program.format("plain"), **given)
        assert plain.stdout.split() == [PARENT, "vendor=x"], plain.stderr
        done = run_driver(
            cluster, program.format("traced"), OTEL_EXPORTER_OTLP_ENDPOINT=made.url, **given
        )
        assert done.returncode == 0, done.stderr
        call = made.one("traced", CLIENT)
        assert call.trace_id.hex() == PARENT[3:35]
        # Its worker exports nothing, and passes on the span of the call.
        assert done.stdout.split()[0] == f"{PARENT[:36]}{call.span_id.hex()}-01"
        driver = made.parent(call)
        assert (driver.kind, driver.parent_span_id.hex()) == (INTERNAL, PARENT[36:52])
        assert driver.trace_state == call.trace_state == "vendor=x"
        off = f"{PARENT[:-2]}00"
        run_driver(
            cluster, program.format("unsampled"), OTEL_EXPORTER_OTLP_ENDPOINT=made.url,
            TRACEPARENT=off,
        )  # fmt: skip
        assert not made.spans("unsampled")


def test_without_a_collector_nothing_of_opentelemetry_is_loaded(tmp_path: Path) -> None:
    program = """
        import sys, stoker
        stoker.init(log_to_driver=False)

        def loaded():
            return [name for name in sys.modules if name.startswith("opentelemetry")
                    or name.startswith("stoker.runtime.process.tracing.")
                    and not name.endswith((".context", ".spans"))]

        with stoker.profile("here"):
            print(loaded(), stoker.get(stoker.remote(num_cpus=0)(loaded).remote()))
        print(repr(stoker.get_runtime_context().traceparent))
    """
    with head(tmp_path, num_cpus=1) as cluster:
        done = run_driver(cluster, program)
    assert done.stdout.splitlines() == ["[] []", "''"], done.stderr


@pytest.mark.parametrize("how", ["refuses", "is silent"])
def test_a_collector_that_is_away_holds_nobody_up(tmp_path: Path, how: str) -> None:
    program = """
        import stoker
        from stoker.runtime.process.tracing import tracer
        tracer.MAX_WAITING = 50
        from stoker.runtime.process.tracing.context import TRACES
        stoker.init(log_to_driver=False)
        f = stoker.remote(num_cpus=0)(lambda: 1)
        print(sum(stoker.get([f.remote() for _ in range(200)])))
        print(len(TRACES.tracer._waiting) <= 51 and TRACES.tracer.dropped > 0)
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if how == "is silent":
            listener.listen(64)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with head(tmp_path, num_cpus=1) as cluster:
            began = time.monotonic()
            done = run_driver(cluster, program, OTEL_EXPORTER_OTLP_ENDPOINT=url)
            assert time.monotonic() - began < WAIT_S
    assert (done.returncode, done.stdout.split()) == (0, ["200", "True"]), done.stderr


def test_a_submitted_job_gets_the_context_of_its_submitter(tmp_path: Path) -> None:
    show = ["sh", "-c", 'echo "<$TRACEPARENT $TRACESTATE>"']
    with head(tmp_path, num_cpus=1) as cluster:
        given = {"TRACEPARENT": PARENT, "TRACESTATE": "vendor=x"}
        for args, more, shown in (
            ((), given, f"{PARENT} vendor=x"),
            (("--env", "TRACEPARENT=mine"), given, "mine "),
            ((), {"TRACEPARENT": "none"}, " "),
        ):
            done = cli(cluster, "job", "submit", *args, "--", *show, **more)
            assert f"<{shown}>" in done.stdout, (done.stdout, done.stderr)
