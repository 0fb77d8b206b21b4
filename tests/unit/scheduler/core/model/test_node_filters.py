"""Node filters on nodes: SQL's three values, what could come to hold, and why something does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stoker_scheduler.wire_types import node_filter_of
from tests.unit.scheduler.samples import GIB, a_node, used

if TYPE_CHECKING:
    from stoker_scheduler.core.model.nodes import NodeInfo


def node() -> NodeInfo:
    labels = {"rack": "r7", "generation": "9", "two words": "x"}
    return used(used(a_node("n_1", labels=labels, hostname="gpu-07"), CPU=3, GPU=1), GPU=0.5)


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("labels.rack = 'r7'", True),
        ("labels.rack != 'r7'", False),
        ("labels.zone != 'a'", False),
        ("not labels.zone = 'a'", False),
        ("labels.zone != 'a' or labels.zone is null", True),
        ("labels.rack is not null", True),
        ("labels.generation >= 9", True),
        ("labels.generation between 10 and 20", False),
        ("labels.rack >= 9", False),
        ("labels.rack in ('a', 'r7')", True),
        ("labels.rack not in ('a', labels.zone)", False),
        ("labels.rack like 'r_'", True),
        ("labels.rack like '_'", False),
        ("labels.\"two words\" not like 'a%'", True),
        ("free.cpu = 1 and total.cpu = 4", True),
        ("free.gpu = 0.5 and total.gpu = 2", True),
        ("free.memory >= '8GiB'", True),
        ("free.nothing = 0", True),
        ("node_id = 'n_1' and hostname like 'gpu-%'", True),
        ("slow_ranks = 0", True),
    ],
)
def test_a_filter_on_a_node(text: str, holds: bool) -> None:
    assert node_filter_of(text).holds(node()) is holds


@pytest.mark.parametrize(
    ("text", "may_hold"),
    [
        ("free.gpu >= 2", True),
        ("free.gpu > 2", False),
        ("3 <= free.gpu", False),
        ("2 >= free.gpu", True),
        ("free.gpu = 3", False),
        ("free.gpu in (3, 1)", True),
        ("free.gpu between 3 and 4", False),
        ("free.gpu between 2 and 4", True),
        ("free.gpu = total.gpu", True),
        ("free.gpu > labels.generation", False),
        ("free.gpu >= 2 and labels.rack = 'r8'", False),
        ("free.gpu >= 2 or labels.rack = 'r8'", True),
        ("slow_ranks > 3", True),
    ],
)
def test_what_time_may_change(text: str, may_hold: bool) -> None:
    assert node_filter_of(text).may_hold(node()) is may_hold


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("labels.rack != 'r7'", "node_filter: labels.rack != 'r7' is false: rack is r7"),
        (
            "free.gpu >= 2 and labels.rack like 'r%'",
            "node_filter: free.GPU >= 2 is false: free.GPU is 0.5",
        ),
        (
            "not (labels.zone = 'a')",
            "node_filter: labels.zone != 'a' is unknown: the node has no label zone",
        ),
        (
            "labels.rack in ('a', 'b') or slow_ranks > 1",
            (
                "node_filter: labels.rack IN ('a', 'b') is false: rack is r7 "
                "and slow_ranks > 1 is false: slow_ranks is 0"
            ),
        ),
    ],
)
def test_why_a_filter_does_not_hold(text: str, words: str) -> None:
    assert node_filter_of(text).why_not(node()) == words


def test_a_filter_of_a_queue_says_so() -> None:
    words = node_filter_of("labels.rack = 'r1'", "research").why_not(node())
    assert words.startswith("node_filter of queue 'research': labels.rack = 'r1' is false")


def test_the_text_of_a_filter_reads_as_the_same_filter() -> None:
    text = "(labels.a = 'x' or labels.\"b c\" IS NULL) and free.memory between 1 and '8GiB'"
    found = node_filter_of(text)
    assert node_filter_of(found.text) == found
    assert found.reads == {"memory"}
    assert f"{8 * GIB}" in found.text
