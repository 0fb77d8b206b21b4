"""Objects whose tensors stay with the process that put them, end to end; host memory plays the GPU's."""

from __future__ import annotations

import gc
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker.exceptions import BadRequestError, ObjectLostError
from tests.e2e.conftest import WAIT_S, get
from tests.services import until

if TYPE_CHECKING:
    from pathlib import Path

torch = pytest.importorskip("torch", reason="needs torch (the `train` extra)")

pytestmark = pytest.mark.usefixtures("cluster")

TORCH_IMPORT_S = 2 * WAIT_S


class Process:
    """An actor with a model on its pretended GPU."""

    def __init__(self, folder: str) -> None:
        os.environ["STOKER_TEST_LENT"] = folder
        from tests.unit.sdk.lent_memory import install

        install()
        self.weights = torch.arange(1000, dtype=torch.float32)

    def pid(self) -> int:
        return os.getpid()

    def share(self) -> list[Any]:
        return [stoker.put({"w": self.weights, "step": 3}, tensor_transport="cuda_ipc")]

    def total(self, value: dict[str, Any]) -> float:
        return float(value["w"].sum()) + value["step"]

    def overwrite(self) -> None:
        self.weights.zero_()

    def lent(self) -> int:
        from stoker.runtime.serialization import cuda_ipc

        gc.collect()
        return len(cuda_ipc._lent)


Actor = stoker.remote(Process)


def test_readers_copy_from_the_lender_until_it_is_freed_or_dies(tmp_path: Path) -> None:
    lender, reader = (Actor.remote(str(tmp_path)) for _ in range(2))
    pid = get(lender.pid.remote(), TORCH_IMPORT_S)
    [first] = get(lender.share.remote(), TORCH_IMPORT_S)
    assert get(lender.lent.remote()) == 1
    get(lender.overwrite.remote())
    assert get(reader.total.remote(first), TORCH_IMPORT_S) == 499_503.0
    assert get(lender.total.remote(first)) == 499_503.0, "the lender itself needs no mapping"
    del first
    until(lambda: get(lender.lent.remote()) == 0, WAIT_S, "the lent copy to be freed with its refs")

    [second] = get(lender.share.remote())
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ObjectLostError):
        get(reader.total.remote(second), TORCH_IMPORT_S)


def test_what_has_no_tensors_of_a_gpu_is_an_ordinary_object() -> None:
    ref = stoker.put([1, torch.ones(3)], tensor_transport="cuda_ipc")
    assert torch.equal(get(ref)[1], torch.ones(3))
    with pytest.raises(BadRequestError, match="tensor_transport='ncl' is not known"):
        stoker.put(1, tensor_transport="ncl")
    with pytest.raises(BadRequestError, match="a detached object outlives it"):
        stoker.put(1, tensor_transport="cuda_ipc", lifetime="detached")
