"""Measurements of earlier jobs with the same code: kept by cluster, used only where the user allows it.

The controller loads one before it fits anything, and stores one when it ends. It is a guess: an own
measurement of a configuration takes its place
(:class:`~stoker_train.elastic.optimization.profile.StepProfile`).
"""

from __future__ import annotations

import hashlib
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple
from typing import Any, Protocol

import msgspec

from stoker_goodput.efficiency import GradientNoise
from stoker_goodput.fitting import Observation

PREFIX = "train/priors/"
MOST_OBSERVATIONS = 256


class KeyValues(Protocol):
    """The part of ``stoker.kv`` that priors need."""

    def get(self, key: str) -> bytes | None:
        """Return the value of ``key``, or None."""

    def put(self, key: str, value: bytes) -> Any:
        """Set the value of ``key``."""


class Prior(msgspec.Struct, frozen=True):
    """The medians of an earlier job's configurations, and the noise of its gradients at its start and end."""

    observations: tuple[tuple[int, int, int, float, float], ...] = ()
    """Nodes, replicas, local batch, seconds of an accumulating pass, and of one that exchanges."""
    sqr: float | None = None
    var: float | None = None

    @classmethod
    def of(cls, observations: Iterable[Observation], noise: GradientNoise | None) -> Prior:
        """Return what is kept of a job."""
        kept = tuple(astuple(one) for one in observations)[-MOST_OBSERVATIONS:]
        return cls(kept, *((noise.sqr, noise.var) if noise is not None else (None, None)))

    def profile(self) -> tuple[Observation, ...]:
        """Return the observations, for ``StepProfile(prior=...)``."""
        return tuple(Observation(*one) for one in self.observations)

    @property
    def noise(self) -> GradientNoise | None:
        """The noise that a job like this had, for choices before its own is measured."""
        if self.sqr is None or self.var is None:
            return None
        return GradientNoise(self.sqr, self.var)


def code_hash(loop: Callable[..., Any], *about: object) -> str:
    """Return a hash of a loop's code and constants, and of all else that speed depends on (the kind of GPU).

    Comments, names of files and line numbers do not count; functions that it calls by a global name do not
    either. Two jobs with one hash are alike enough for a guess.
    """
    digest = hashlib.sha256()
    function = getattr(loop, "__wrapped__", loop)
    code = getattr(function, "__code__", None)
    if not isinstance(code, types.CodeType):
        raise TypeError(f"loop is {type(loop).__name__}: it must be a Python function")
    _add_code(digest, code)
    for one in about:
        digest.update(repr(one).encode())
        digest.update(b"\0")
    return digest.hexdigest()[:32]


def load(values: KeyValues, key: str) -> Prior:
    """Return the prior under a code hash; an empty one if there is none, or none that can be read."""
    found = values.get(PREFIX + key)
    if found is None:
        return Prior()
    try:
        prior = msgspec.msgpack.decode(found, type=Prior)
        prior.profile()
        _ = prior.noise
    except (msgspec.MsgspecError, ValueError):  # of another version: a guess is not worth a failure
        return Prior()
    return prior


def store(values: KeyValues, key: str, prior: Prior) -> None:
    """Keep a prior under a code hash, in the place of the one before."""
    values.put(PREFIX + key, msgspec.msgpack.encode(prior))


def _add_code(digest: Any, code: types.CodeType) -> None:
    digest.update(code.co_code)
    for text in (*code.co_names, *code.co_varnames):
        digest.update(text.encode() + b"\0")
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            _add_code(digest, constant)
        else:
            digest.update(repr(constant).encode() + b"\0")


def merged(own: Prior, before: Mapping[str, Any] | Prior) -> Prior:
    """Return a job's prior with the configurations that only earlier jobs had."""
    earlier = before if isinstance(before, Prior) else Prior(**before)
    keys = {one[:3] for one in own.observations}
    kept = tuple(one for one in earlier.observations if one[:3] not in keys)
    observations = (*kept, *own.observations)[-MOST_OBSERVATIONS:]
    noise = own if own.sqr is not None else earlier
    return Prior(observations, noise.sqr, noise.var)
