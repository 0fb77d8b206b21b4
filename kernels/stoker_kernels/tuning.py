"""The block sizes that a kernel is launched with: the launcher's own heuristic, or a measured better one.

Launchers ask :func:`choose` at every launch. The table maps (kernel, shape) to a configuration for one
device; whoever measured it (``stoker.train.autotune`` on a cluster) installs it with :func:`install`,
or names a file in ``STOKER_KERNELS_TUNING``, which is read on first use. A heuristic stands where
the table is silent, so an empty table is always right, only perhaps slower.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

TABLE_VARIABLE = "STOKER_KERNELS_TUNING"

Config = dict[str, int]  # constexpr block sizes, and num_warps, num_stages
Key = tuple[tuple[str, int | str], ...]  # what the choice depends on, sorted by name


@dataclass(frozen=True, slots=True)
class Question:
    """One choice a launcher had to make: which configuration for ``kernel`` at ``key``."""

    kernel: str
    key: Key
    default: Config
    candidates: Sequence[Config]


@dataclass(slots=True)
class _State:
    table: dict[tuple[str, Key], Config] = field(default_factory=dict)
    forced: dict[tuple[str, Key], Config] = field(default_factory=dict)
    asked: dict[tuple[str, Key], Question] | None = None


@cache
def _state() -> _State:
    state = _State()
    path = os.environ.get(TABLE_VARIABLE)
    if path:
        for record in json.loads(Path(path).read_text()):
            state.table[record["kernel"], make_key(record["key"])] = record["config"]
    return state


def make_key(key: Mapping[str, Any]) -> Key:
    """Return a mapping such as ``{"columns": 4096, "dtype": torch.bfloat16}`` as a table key.

    Its values are numbers and text, as the table travels: True is 1.
    """
    return tuple(
        (name, int(value) if isinstance(value, int) else str(value).removeprefix("torch."))
        for name, value in sorted(key.items())
    )


def choose(
    kernel: str, default: Config, candidates: Callable[[], Sequence[Config]], **key: Any
) -> Config:
    """Return the configuration to launch ``kernel`` with: the table's for this key, or ``default``.

    ``candidates`` lists what an autotuner may try; it is called only while one listens, and for an
    entry whose names are not those of ``default``. Every candidate must give a right result: they
    may differ in speed and summation order only. What the table has under names that no candidate
    has is ignored.
    """
    state = _state()
    if not state.table and state.asked is None and not state.forced:
        return default
    where = kernel, make_key(key)
    if state.asked is not None:
        state.asked[where] = Question(kernel, where[1], default, candidates())
    if where in state.forced:
        return state.forced[where]
    tuned = state.table.get(where)
    if tuned is None or tuned.keys() == default.keys():
        return tuned or default
    # A table of another version may name constants that the kernel no longer has.
    return tuned if any(tuned.keys() == one.keys() for one in candidates()) else default


def install(kernel: str, key: Mapping[str, Any], config: Config) -> None:
    """Use ``config`` for ``kernel`` at ``key`` from now on in this process."""
    _state().table[kernel, make_key(key)] = dict(config)


def clear() -> None:
    """Forget the table; the next use reads ``STOKER_KERNELS_TUNING`` again."""
    _state.cache_clear()


@contextmanager
def listening() -> Iterator[dict[tuple[str, Key], Question]]:
    """Collect the choices that launchers make inside, by (kernel, key)."""
    state = _state()
    before, state.asked = state.asked, {}
    try:
        yield state.asked
    finally:
        state.asked = before


@contextmanager
def forcing(question: Question, config: Config) -> Iterator[None]:
    """Answer ``question`` with ``config`` inside, whatever the table says."""
    state = _state()
    where = question.kernel, question.key
    state.forced[where] = config
    try:
        yield
    finally:
        del state.forced[where]
