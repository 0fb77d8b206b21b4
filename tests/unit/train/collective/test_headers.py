"""Headers of calls: equal ones agree whenever they were sent, and of others all differences are named."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_train.collective import headers
from stoker_train.collective.headers import Call

CALL = Call("all_reduce", "sum", "float32", "(128, 4)", "grad")
calls = st.builds(Call, *(st.text(max_size=60) for _ in range(5)))


def table(*sent: Call) -> bytes:
    return b"".join(headers.encode(call, 7, 1_000 + rank) for rank, call in enumerate(sent))


@given(calls, st.integers(0, 2**62), st.integers(0, 2**62))
def test_a_header_has_one_size_and_says_what_is_called(call: Call, number: int, at_ns: int) -> None:
    header = headers.encode(call, number, at_ns)
    assert len(header) == headers.NBYTES
    assert headers.sent_ns(header) == at_ns
    assert headers.agree(header * 3)
    if len(str(call).encode()) < 100:
        assert headers.described(header) == str(call)


@given(calls, calls)
def test_calls_agree_if_their_texts_do(one: Call, other: Call) -> None:
    assert headers.agree(table(one, other)) == (str(one) == str(other))


@given(st.text(min_size=200, max_size=400), st.text(min_size=1, max_size=3))
def test_long_calls_differ_by_what_is_cut_off(text: str, more: str) -> None:
    assert not headers.agree(table(Call(text), Call(text + more)))


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"operation": "broadcast"}, "broadcast sum float32 (128, 4) 'grad'"),
        ({"detail": "mean"}, "all_reduce mean float32 (128, 4) 'grad'"),
        ({"dtype": "float64"}, "all_reduce sum float64 (128, 4) 'grad'"),
        ({"shape": "(128,)"}, "all_reduce sum float32 (128,) 'grad'"),
        ({"name": "bias"}, "all_reduce sum float32 (128, 4) 'bias'"),
        ({"device": "cuda"}, "all_reduce sum float32 (128, 4) on cuda 'grad'"),
    ],
)
def test_what_is_different_is_named_with_its_rank(changed: dict[str, str], text: str) -> None:
    sent = table(CALL, replace(CALL, **changed), CALL)
    assert not headers.agree(sent)
    said, apart = headers.differences(sent, (4, 5, 6))
    assert said.splitlines() == [
        "ranks [4, 6] at #7: all_reduce sum float32 (128, 4) 'grad'",
        f"rank 5 at #7: {text}",
    ]
    assert apart == (5,)


def test_many_different_calls_are_counted() -> None:
    said, apart = headers.differences(table(*(Call(f"op{n}") for n in range(9))), range(9))
    assert said.splitlines()[-1] == "and 5 more"
    assert apart == tuple(range(1, 9))


def test_another_number_is_a_difference() -> None:
    assert not headers.agree(headers.encode(CALL, 1, 0) + headers.encode(CALL, 2, 0))
