"""The limits that a nodelet finds on its machine."""

from __future__ import annotations

from stoker_nodelet.devices import limits


def test_a_node_has_cpus_and_memory() -> None:
    assert limits.usable_cpus() >= 1
    assert 0 < limits.schedulable_memory_bytes() < limits.memory_limit_bytes()
    assert limits.oom_kills() >= 0
