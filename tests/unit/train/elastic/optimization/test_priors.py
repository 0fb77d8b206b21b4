"""Priors from earlier jobs with the same code."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from stoker_goodput.efficiency import GradientNoise
from stoker_goodput.fitting import Observation
from stoker_train.elastic.optimization import Prior, StepProfile, code_hash, priors

ONE = Observation(1, 1, 8, 0.1, 0.1)
TWO = Observation(1, 2, 8, 0.1, 0.2)


class Values(dict[str, bytes]):
    """The part of ``stoker.kv`` that priors need."""

    def put(self, key: str, value: bytes) -> None:
        self[key] = value


def loop(ctx: Any) -> int:
    def inner() -> int:
        return 3

    return inner() + 1


def test_a_prior_is_kept_by_code() -> None:
    values, key = Values(), code_hash(loop, "H100")
    assert priors.load(values, key) == Prior()
    priors.store(values, key, Prior.of([ONE], GradientNoise(2.0, 3.0)))
    found = priors.load(values, key)
    assert found.profile() == (ONE,)
    assert found.noise == GradientNoise(2.0, 3.0)
    assert StepProfile(found.profile()).params is not None
    assert Prior().noise is None


def test_what_cannot_be_read_is_no_prior() -> None:
    values = Values()
    for bad in (b"", b"\x81", b"nonsense", b"\x81\xacobservations\x91\x95\x00\x01\x01\x01\x01"):
        values.put(priors.PREFIX + "x", bad)
        assert priors.load(values, "x") == Prior()


def test_a_hash_is_of_what_runs() -> None:
    namespace: dict[str, Any] = {}
    source = "def loop(ctx):\n    def inner():\n        return {}\n    return inner() + 1\n"
    hashes = []
    for number, before in ((3, ""), (3, "\n\n# a comment\n"), (4, "")):
        exec(compile(before + source.format(number), f"<{number}>", "exec"), namespace)
        hashes.append(code_hash(namespace["loop"]))
    assert hashes[0] == hashes[1] != hashes[2]
    assert code_hash(loop, "A100") != code_hash(loop, "H100")
    assert code_hash(functools.wraps(loop)(lambda ctx: loop(ctx))) == code_hash(loop)
    with pytest.raises(TypeError, match="loop is int"):
        code_hash(3)  # type: ignore[arg-type]


def test_configurations_of_earlier_jobs_stay() -> None:
    before = Prior.of([ONE, TWO], GradientNoise(1.0, 1.0))
    newer = Observation(1, 2, 8, 0.3, 0.4)
    merged = priors.merged(Prior.of([newer], None), before)
    assert set(merged.profile()) == {ONE, newer}
    assert merged.noise == GradientNoise(1.0, 1.0)
    assert priors.merged(Prior.of([], GradientNoise(2.0, 2.0)), before).noise == GradientNoise(2, 2)
