"""The grammar of node filters: what is read, and where what cannot be read goes wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_wire.constraints.node_filters import (
    MAX_DEPTH,
    MAX_LENGTH,
    AllOf,
    AnyOf,
    Attribute,
    Condition,
    Field,
    NodeFilterError,
    check,
    parse,
)
from stoker_wire.errors import BadRequestError

RACK = Field(Attribute.LABELS, "rack")
FREE_GPU = Field(Attribute.FREE, "GPU")


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        (
            "labels.rack != 'r7' and free.gpu >= 2",
            AllOf((Condition("!=", (RACK, "r7")), Condition(">=", (FREE_GPU, 2.0)))),
        ),
        (
            "labels.rack = 'a' OR labels.rack = 'b' AND free.GPU > 1",
            AnyOf(
                (
                    Condition("=", (RACK, "a")),
                    AllOf((Condition("=", (RACK, "b")), Condition(">", (FREE_GPU, 1.0)))),
                )
            ),
        ),
        (
            "not (labels.rack in ('a', 'b') or free.gpu < 1)",
            AllOf((Condition("NOT IN", (RACK, "a", "b")), Condition(">=", (FREE_GPU, 1.0)))),
        ),
        ("not not labels.rack is null", Condition("IS NULL", (RACK,))),
        ("labels.rack IS NOT NULL", Condition("IS NOT NULL", (RACK,))),
        ("labels.rack not like 'r_%'", Condition("NOT LIKE", (RACK, "r_%"))),
        (
            "free.memory between '64GiB' and 1e12",
            Condition("BETWEEN", (Field(Attribute.FREE, "memory"), float(64 << 30), 1e12)),
        ),
        ("2 <= free.gpu", Condition("<=", (2.0, FREE_GPU))),
        ("free.gpu = total.GPU", Condition("=", (FREE_GPU, Field(Attribute.TOTAL, "GPU")))),
        ("labels.rack <> 'it''s'", Condition("!=", (RACK, "it's"))),
        ("labels.a.b/c-d = 1", Condition("=", (Field(Attribute.LABELS, "a.b/c-d"), 1.0))),
        ('labels."two words" = 1', Condition("=", (Field(Attribute.LABELS, "two words"), 1.0))),
        ("slow_ranks = 0", Condition("=", (Field(Attribute.SLOW_RANKS), 0.0))),
        ("labels.and = 'or'", Condition("=", (Field(Attribute.LABELS, "and"), "or"))),
    ],
)
def test_a_node_filter(text: str, parsed: object) -> None:
    assert parse(text) == parsed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "ends too early, at position 1"),
        ("free.gpu >=", "ends too early, at position 12"),
        ("labels.rack !! 'r7'", "at position 13, from \"!! 'r7'\" on"),
        ("labels.rack = 'a' xor free.gpu = 1", "at position 19"),
        ('labels.rack = "r7"', "write texts in single quotes"),
        ("labels.rack in ()", "at position 17"),
        ("rack = 'r7'", "'rack' at position 1 is no attribute of a node"),
        ("slow_ranks = 0 and slowranks.x = 1", "'slowranks.x' at position 20"),
        ("labels = 'r7'", "did you mean 'labels.NAME'"),
        ("node_id = 3", "compares a text with a number"),
        ("free.gpu > 'many'", "'many' is no amount"),
        ("free.gpu is null", "can only be asked of a label"),
        ("free.gpu like '2'", "is for texts"),
        ("1 = 1", "names no attribute"),
        ("(" * (MAX_DEPTH + 1) + "slow_ranks = 0" + ")" * (MAX_DEPTH + 1), "at position 33"),
        ("slow_ranks = " + "0" * MAX_LENGTH, f"use {MAX_LENGTH} at most"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(text: str, words: str) -> None:
    with pytest.raises(NodeFilterError) as caught:
        parse(text)
    assert words in str(caught.value)


@given(st.text("labels.fgpu_tonr=<>'\"() 12nadi,", max_size=40) | st.text(max_size=40))
def test_no_text_breaks_the_parser(text: str) -> None:
    try:
        parse(text)
    except NodeFilterError as error:
        assert "\n" in str(error)


def test_a_check_names_the_field() -> None:
    check("")
    check("slow_ranks = 0")
    with pytest.raises(BadRequestError, match=r"bundles\.0\.node_filter cannot be read") as caught:
        check("rack", "bundles.0.node_filter")
    assert caught.value.field == "bundles.0.node_filter"
