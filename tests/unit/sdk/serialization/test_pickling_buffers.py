"""Arrays, bytes and views as values: what they are on arrival, and what is copied."""

from __future__ import annotations

import array
from typing import Any

import pytest

from stoker.runtime.serialization.pickling import LargeBytes, pack
from tests.unit.sdk.packing import inline, stored, travel

np = pytest.importorskip("numpy")


@pytest.mark.parametrize("lay", [stored, inline])
@pytest.mark.parametrize(
    "sent",
    [
        np.array(5),
        np.array([]),
        np.zeros((0, 3)),
        np.arange(20).reshape(4, 5)[::2, ::3],
        np.arange(20).reshape(4, 5).T,
        np.asfortranarray(np.arange(20.0).reshape(4, 5)),
        np.arange(5)[::-1],
        np.broadcast_to(np.arange(3), (4, 3)),
        np.array([(1, 2.5, b"x")], dtype=[("a", "i4"), ("b", "f8"), ("c", "S3")]),
        np.array([1, "two", None, [3]], dtype=object),
        np.array(["2026-11-21"], dtype="datetime64[D]"),
        np.array(["é", "long text"]),
        np.arange(4, dtype=">i2"),
        np.float16(1.5),
    ],
    ids=lambda a: f"{a.dtype.str}{a.shape}" if a.dtype.names is None else "structured",
)
def test_arrays_come_back(sent: Any, lay: Any) -> None:
    found = travel(sent, lay)
    assert type(found) is type(sent)
    assert (found.dtype, found.shape) == (sent.dtype, sent.shape)
    assert found.tolist() == sent.tolist()


@pytest.mark.parametrize("lay", [stored, inline])
@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"x" * 70_000,
        bytearray(b"y"),
        bytearray(b"y" * 70_000),
        [b"x" * 70_000, bytearray(70_000)],
        LargeBytes(b"z" * 10),
        array.array("d", [1.5, 2.5]),
        memoryview(b"abc"),
        memoryview(array.array("i", range(6))).cast("B").cast("i", (2, 3)),
        [memoryview(array.array("d", [0.5]))],
    ],
    ids=lambda v: type(v).__name__,
)
def test_bytes_come_back(sent: Any, lay: Any) -> None:
    found = travel(sent, lay)
    sent = sent.value if isinstance(sent, LargeBytes) else sent
    assert type(found) is type(sent)
    assert found == sent


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_large_bytes_are_packed_without_a_copy(kind: type) -> None:
    sent = kind(1_000_000)
    packed = pack(sent, what="value")
    assert len(packed.data) < 200
    assert packed.buffers[0].obj is sent


def test_a_view_with_gaps_or_of_a_strange_format_arrives_as_bytes() -> None:
    assert travel(memoryview(b"abcdef")[::2]) == b"ace"
    assert travel(memoryview(b"")) == b""
    assert travel(memoryview(np.arange(2, dtype=">i2"))) == b"\0\0\0\1"
