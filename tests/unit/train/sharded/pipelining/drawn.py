"""Pipelines drawn by Hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from stoker_train.sharded.pipelining.schedules import Action, Kind, schedule


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Kind, int, int, int]:
    """Kind, pipeline, micro-batches and interleave that go together."""
    kind = draw(st.sampled_from(Kind))
    pipeline = draw(st.integers(1, 8))
    interleave = draw(st.integers(2, 4)) if kind is Kind.INTERLEAVED else 1
    micro_batches = draw(st.integers(1, 20))
    if kind is Kind.INTERLEAVED and micro_batches > pipeline:
        rounds = micro_batches // pipeline
        micro_batches -= micro_batches % rounds
    return kind, pipeline, micro_batches, interleave


def orders_of(kind: Kind, pipeline: int, micro_batches: int, interleave: int) -> list[list[Action]]:
    return [schedule(kind, pipeline, micro_batches, rank, interleave) for rank in range(pipeline)]
