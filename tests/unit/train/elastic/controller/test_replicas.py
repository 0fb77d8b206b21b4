"""What nodes import for the replicas of a job, before there are any."""

from __future__ import annotations

import pytest

from stoker_train.reporting_actors import preloaded


@pytest.mark.parametrize(
    ("said", "has"), [(None, True), ("0", True), ("", True), ("1", False), ("true", False)]
)
def test_what_imports_triton_is_left_to_processes_that_are_to_interpret_it(
    monkeypatch: pytest.MonkeyPatch, said: str | None, has: bool
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if said is not None:
        monkeypatch.setenv("TRITON_INTERPRET", said)
    modules = preloaded("torch")
    assert modules[:1] == ["torch"]
    assert ("torch._dynamo" in modules) is has
