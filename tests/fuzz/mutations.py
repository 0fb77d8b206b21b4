"""Inputs of fuzzing, by a seed: valid ones, what a broken sender or a damaged disk makes of them, and noise.

Pure: the same seed gives the same inputs, so that a finding is repeated by its number alone.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence

EXTREMES = (
    0,
    1,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0xFFFF,
    0x7FFFFFFF,
    0xFFFFFFFF,
    (1 << 63) - 1,
    (1 << 64) - 1,
)
_LENGTHS = tuple(struct.Struct(order + kind) for order in "<>" for kind in "BHIQ")
_HEADS_OF_MSGPACK = bytes((0x80, 0x8F, 0x90, 0x9F, *range(0xC0, 0xE0), 0xFF))
"""The first byte of each kind of value; those of lengths among them."""
_LONGEST_NOISE = 300
_NESTING = 4000

Mutation = Callable[[random.Random, bytearray, Sequence[bytes]], None]


def flip(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    """Flip a few bits."""
    for _ in range(rng.choice((1, 1, 2, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def replace_byte(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    """Replace one byte by the head of another value, or by any."""
    data[rng.randrange(len(data))] = rng.choice((rng.choice(_HEADS_OF_MSGPACK), rng.randrange(256)))


def truncate(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    """Cut the end off."""
    del data[rng.randrange(len(data)) :]


def drop(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    """Leave a part out."""
    at = rng.randrange(len(data))
    del data[at : at + rng.randrange(1, 17)]


def duplicate(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    """Have a part twice."""
    at = rng.randrange(len(data))
    part = data[at : at + rng.choice((1, 4, 16, len(data)))]
    data[at:at] = part


def insert(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    """Put noise in between."""
    at = rng.randrange(len(data) + 1)
    data[at:at] = rng.randbytes(rng.randrange(1, 9))


def set_length(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    """Write an extreme number over what may be a length."""
    kind = rng.choice(_LENGTHS)
    if len(data) >= kind.size:
        at = rng.choice((0, 4, 8, rng.randrange(len(data))))
        at = min(at, len(data) - kind.size)
        limit = 1 << 8 * kind.size
        value = (rng.choice(EXTREMES) + rng.choice((0, 0, -1, 1))) % limit
        kind.pack_into(data, at, value)


def splice(rng: random.Random, data: bytearray, samples: Sequence[bytes]) -> None:
    """Go on with the end of another valid input."""
    other = rng.choice(samples)
    at = rng.randrange(len(data))
    data[at:] = other[rng.randrange(len(other) + 1) :]


def nest(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    """Put values within values, as deep as a decoder may follow."""
    at = rng.randrange(len(data) + 1)
    opening = rng.choice((b"\x91", b"\x81\xa1a", b"[", b'{"a":', b"(", b"NOT "))
    data[at:at] = opening * rng.choice((3, 40, _NESTING))


MUTATIONS: tuple[Mutation, ...] = (
    flip, flip, replace_byte, replace_byte, truncate, drop, duplicate, insert, set_length, set_length, splice,
)  # fmt: skip
"""Some twice: what they find most lies in."""
NESTED_EVERY = 200
"""Deep inputs are long: one in so many is one."""


def input_of(seed: str, number: int, samples: Sequence[bytes]) -> bytes:
    """Return input ``number`` of a run: a valid one, noise, or (mostly) a valid one with some mutations."""
    rng = random.Random(f"{seed} {number}")
    if number < len(samples):
        return samples[number]
    if rng.random() < 0.05:
        return rng.randbytes(rng.randrange(_LONGEST_NOISE))
    data = bytearray(rng.choice(samples))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        if data:
            rng.choice(MUTATIONS)(rng, data, samples)
    if number % NESTED_EVERY == 0:
        nest(rng, data, samples)
    return bytes(data)
