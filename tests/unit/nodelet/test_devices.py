"""The devices and limits that a nodelet finds on its machine."""

from __future__ import annotations

from stoker_nodelet import devices


def test_more_gpus_than_there_are_become_fakes() -> None:
    found = devices.find_devices(num_gpus=2, fake_gpus=3)
    assert [(one.index, one.fake) for one in found] == [(0, True), (1, True)]
    assert devices.accelerator_labels(found) == {"accelerator_type": "Fake-GPU"}
    assert devices.visible_mask({2: 0.5, 0: 1.0}) == "0,2"
    assert devices.visible_mask({}) == ""
    assert devices.usable_cpus() >= 1
    assert 0 < devices.schedulable_memory_bytes() < devices.memory_limit_bytes()
    assert devices.oom_kills() >= 0
