"""The GPUs that a node offers: limited, or filled up with fake ones."""

from __future__ import annotations

from stoker_nodelet.devices.discovery import find_gpus
from stoker_wire.settings import Settings


def test_more_gpus_than_there_are_become_fakes() -> None:
    found, library = find_gpus(Settings(fake_gpus=3), 2)
    assert [(one.index, one.fake) for one in found.devices] == [(0, True), (1, True)]
    assert found.labels == {"accelerator_type": "Fake-GPU"}
    assert library is None, "nothing can measure them"
