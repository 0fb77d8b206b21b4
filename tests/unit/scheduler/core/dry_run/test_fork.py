"""Copies of the state: equal, apart, and complete whatever fields the state has."""

from __future__ import annotations

from dataclasses import is_dataclass
from enum import Enum
from typing import Any

import msgspec
import pytest

from stoker_scheduler.core import events as ev
from stoker_scheduler.core.dry_run.fork import fork
from stoker_scheduler.core.state import State, Timer
from tests.unit.scheduler.core_driver import Core
from tests.unit.scheduler.random_states import random_core


def mutable_parts(value: Any, found: dict[int, Any]) -> dict[int, Any]:
    """Return all that can change in a graph of objects, by id."""
    kind = type(value)
    if issubclass(kind, (str, int, float, Enum, frozenset, type(None))) or callable(value):
        return found
    if issubclass(kind, msgspec.Struct) and kind.__struct_config__.frozen:
        return found
    if is_dataclass(kind) and kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return found
    if id(value) in found:
        return found
    if not isinstance(value, tuple):
        found[id(value)] = value
    slots = [n for base in kind.__mro__ for n in base.__dict__.get("__slots__", ())]
    parts: list[Any] = [getattr(value, name) for name in slots]
    if isinstance(value, dict):
        parts = list(value.values())
    elif isinstance(value, (list, tuple)):
        parts = list(value)
    for part in parts:
        mutable_parts(part, found)
    return found


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_a_fork_is_equal_and_shares_nothing_that_can_change(first: int) -> None:
    for seed in range(first, first + 20):
        core, _ = random_core(seed)
        state = core.state
        twin = fork(state)
        twin.check()
        copied, real = twin.snapshot(), state.snapshot()
        assert {**copied, "answers": []} == {**real, "answers": []}, f"seed {seed}"
        ours, theirs = mutable_parts(twin, {}), mutable_parts(state, {})
        shared = [theirs[i] for i in ours.keys() & theirs.keys()]
        assert not shared, f"seed {seed}: {shared}"


def test_what_happens_in_a_fork_stays_there() -> None:
    core, _ = random_core(7)
    before = core.state.snapshot()
    other = Core()
    other.state = fork(core.state)
    other.at_s = core.at_s
    for node_id in list(other.state.nodes):
        other.feed(ev.NodeLost(at_s=other.at_s, node_id=node_id))
    assert not other.state.leases and not other.state.nodes
    assert core.state.snapshot() == before


def test_owners_of_a_fork_renew_what_they_have_and_repeat_what_they_ask_for() -> None:
    core = Core({"CPU": 1})
    core.ask(CPU=1, wait_s=5.0)
    core.ask("p_2", CPU=1, wait_s=5.0)
    twin = fork(core.state)
    kinds = {timer for _, _, timer, _ in twin.timers}
    assert not kinds & {Timer.DEADLINE, Timer.EXPIRY}
    assert len(twin.leases) == len(twin.pending) == 1


def test_a_type_that_cannot_be_copied_is_named() -> None:
    class Plain:
        pass

    state = State()
    state.answers = Plain()  # type: ignore[assignment]
    state.usage = {"x": Plain()}  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="Plain without __slots__"):
        fork(state)
