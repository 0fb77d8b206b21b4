"""Results of equal calls: found again, bounded, and never an error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from stoker.runtime.tasks import result_cache as module
from stoker.runtime.tasks.result_cache import ResultCache
from stoker_wire.messages.data import Buffer, Failed, Inline


def ref(location: Any = None) -> Any:
    return SimpleNamespace(_entry=SimpleNamespace(location=location))


def test_a_call_is_named_by_its_function_and_arguments() -> None:
    plain = ResultCache.key("f", Inline(b"ab"))
    assert plain == ResultCache.key("f", Inline(b"ab"))
    others = [
        ResultCache.key("g", Inline(b"ab")),
        ResultCache.key("f", Inline(b"a", (Buffer(b"c"),))),
    ]
    assert plain not in others


def test_failures_are_not_remembered() -> None:
    memo = ResultCache()
    key = ("f", b"1")
    memo.put(key, ref(Failed("task_error", "no")))
    assert memo.get(key) is None
    assert len(memo) == 0


def test_the_one_that_was_used_the_longest_ago_goes(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "_RESULTS", 3)
    memo = ResultCache()
    refs = {i: ref() for i in range(4)}
    for i in range(3):
        memo.put(("f", bytes([i])), refs[i])
    assert memo.get(("f", b"\0")) is refs[0]
    memo.put(("f", b"\3"), refs[3])
    found = [i for i in range(4) if memo.get(("f", bytes([i]))) is not None]
    assert found == [0, 2, 3]
    assert len(memo) == 3
