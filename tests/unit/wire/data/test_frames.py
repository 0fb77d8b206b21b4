"""Frames: what goes in comes out, whatever is empty and wherever a head ends; noise is refused."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_wire.data.frames import ALIGNMENT, MAX_BUFFERS, FrameCodec
from stoker_wire.errors import BadRequestError
from stoker_wire.messages.data import Buffer, Call, Inline, Run

sizes = st.sampled_from([0, 0, 0, 1, 63, 64, 65, 1000])
values = st.tuples(st.integers(0, 3 * ALIGNMENT), st.lists(sizes, max_size=6))


def message(head_nbytes: int, buffers: list[int]) -> Run:
    raw = tuple(Buffer(bytes([i + 1]) * nbytes) for i, nbytes in enumerate(buffers))
    return Run([Call("t_1", 0, Inline(b"x" * head_nbytes, raw))])


def read(frame: bytes) -> list[tuple[int, list[bytes]]]:
    found = []
    for run in FrameCodec().decode(frame):
        assert isinstance(run, Run)
        args = run.calls[0].args
        assert isinstance(args, Inline)
        found.append((len(args.data), [bytes(buffer.view) for buffer in args.buffers]))
    return found


def framed(lengths: Any, *numbers: int, behind: bytes = b"") -> bytes:
    """A frame as a hostile peer may write it: any table of lengths, any numbers of buffers."""
    call = ["t_1", 0, [0, b"", list(numbers)]]
    head = msgspec.msgpack.encode([lengths, [[2, [call]]]])
    return struct.pack("<I", len(head)) + head + behind


@given(st.lists(values, max_size=4))
def test_what_is_encoded_is_decoded(content: list[tuple[int, list[int]]]) -> None:
    frame = FrameCodec().encode([message(*each) for each in content])
    assert read(frame) == [
        (nbytes, [bytes([i + 1]) * size for i, size in enumerate(buffers)])
        for nbytes, buffers in content
    ]


@pytest.mark.parametrize("buffers", [[0], [0, 0], [3, 0], [0, 3], [0, 64, 0]])
def test_a_head_may_end_anywhere(buffers: list[int]) -> None:
    ends = set()
    for nbytes in range(2 * ALIGNMENT):
        frame = FrameCodec().encode([message(nbytes, buffers)])
        ends.add((4 + struct.unpack_from("<I", frame)[0]) % ALIGNMENT)
        ((_, found),) = read(frame)
        assert [len(each) for each in found] == buffers
    assert len(ends) == ALIGNMENT, "some place where a head may end was not tried"


def test_a_buffer_is_an_aligned_view_of_the_frame() -> None:
    frame = FrameCodec().encode([message(11, [5, 0, 7])])
    (run,) = FrameCodec().decode(frame)
    assert isinstance(run, Run)
    args = run.calls[0].args
    assert isinstance(args, Inline)
    for buffer in args.buffers:
        view = buffer.view
        assert isinstance(view, memoryview)
        assert view.readonly
        if view.nbytes:
            assert view.obj is frame
            assert frame.index(bytes(view)) % ALIGNMENT == 0


def test_views_of_any_shape_are_taken() -> None:
    shaped = memoryview(bytes(range(24))).cast("B", (2, 3, 4))
    empty = memoryview(bytes(24)).cast("B", (4, 6))[4:]
    frame = FrameCodec().encode([Run([Call("t", 0, Inline(b"", (Buffer(shaped), Buffer(empty))))])])
    assert read(frame) == [(0, [bytes(range(24)), b""])]


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        pytest.param(b"\x01", "shorter than its length prefix", id="no prefix"),
        pytest.param(struct.pack("<I", 9) + b"12", "announces a head of", id="cut head"),
        pytest.param(struct.pack("<I", 3) + b"abc", "cannot be read", id="noise"),
        pytest.param(framed([-64, 8], 0, 1, behind=bytes(200)), "cannot be read", id="negative"),
        pytest.param(framed(["8"], 0, behind=bytes(99)), "cannot be read", id="text"),
        pytest.param(framed({}, 0, behind=bytes(99)), "cannot be read", id="no table"),
        pytest.param(framed([2**64 - 1], 0, behind=bytes(99)), "shorter than its", id="huge"),
        pytest.param(framed([8], 0, behind=bytes(8)), "shorter than its", id="cut buffer"),
        pytest.param(framed([0], 1), "refers to buffer 1", id="unknown"),
        pytest.param(framed([0, 0], 1, 0), "refers to buffer 1", id="order"),
        pytest.param(framed([], 0), "carries 0 buffers", id="missing"),
        pytest.param(framed([0] * 3_000_000), "carries 3000000 buffers", id="millions"),
        pytest.param(framed([0] * (MAX_BUFFERS + 1)), "cannot be read", id="too many"),
    ],
)
def test_a_bad_frame_is_a_bad_request(frame: bytes, reason: str) -> None:
    codec = FrameCodec()
    with pytest.raises(BadRequestError, match=reason):
        codec.decode(frame)
    assert len(codec.decode(framed([0], 0))) == 1, "a bad frame spoils no later one"


@given(st.binary(max_size=200), st.data())
def test_noise_is_a_bad_request_or_a_frame(noise: bytes, data: st.DataObject) -> None:
    good = FrameCodec().encode([message(20, [0, 70])])
    at = data.draw(st.integers(0, len(good)))
    for frame in (noise, good[:at] + noise + good[at + len(noise) :]):
        with contextlib.suppress(BadRequestError):
            FrameCodec().decode(frame)


def test_fields_that_a_newer_peer_appends_are_ignored() -> None:
    call = [
        "t_1",
        0,
        [0, b"args", [], [], "new"],
        [],
        3,
        1.5,
        "parent",
        "trace",
        "new",
        {"newer": 1},
    ]
    head = msgspec.msgpack.encode([[], [[2, [call], [], "new"]]])
    (run,) = FrameCodec().decode(struct.pack("<I", len(head)) + head)
    assert isinstance(run, Run)
    assert run.calls == [Call("t_1", 0, Inline(b"args"), (), 3, 1.5, "parent", "trace")]
