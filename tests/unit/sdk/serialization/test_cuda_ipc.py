"""Loans of CUDA memory: what travels, what a reader gets, and what it is told when it cannot."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from typing import Any

import pytest

from stoker.exceptions import ObjectLostError, SerializationError
from stoker.runtime.serialization.pickling import Packed, pack, unpack

torch = pytest.importorskip("torch", reason="needs torch (the `train` extra)")

from stoker.runtime.serialization import cuda_ipc  # noqa: E402
from stoker.runtime.serialization.cuda_ipc import Lender, Lending, Loan  # noqa: E402
from stoker_wire.process.host_identity import pid_namespace, start_time  # noqa: E402
from tests.unit.sdk.lent_memory import FakeMemory  # noqa: E402


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("STOKER_TEST_LENT", str(tmp_path))
    monkeypatch.setattr(cuda_ipc, "CudaIpcMemory", FakeMemory)


def lent(value: Any) -> tuple[Packed, Lending]:
    lending = Lending(FakeMemory())
    return pack(value, what="value", lend=lending.lend), lending


def read(packed: Packed) -> Any:
    return unpack(packed.data, packed.buffers, what="value")


def as_another(monkeypatch: pytest.MonkeyPatch, parent: bool = True) -> None:
    """Have loans of this process look like those of its parent, which lives, or of one that has ended."""
    pid = os.getppid() if parent else 2**22 + 1
    other = Lender(pid_namespace(), pid, start_time(pid) or 1)
    monkeypatch.setattr(cuda_ipc, "_this_process", lambda: other)


def test_no_bytes_travel_and_the_reader_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    base = torch.arange(200_000, dtype=torch.float32).reshape(200, 1000)
    value = {"whole": base, "turned": base.T, "row": base[3], "tied": base, "columns": base[:, ::7]}
    with monkeypatch.context() as patch:
        as_another(patch)
        packed, lending = lent(value)
    assert not packed.buffers
    assert packed.nbytes < 8_000
    assert len(lending.copies) == 3, "the whole, a row, and columns: the same memory is lent once"
    found = read(packed)
    for name, tensor in value.items():
        assert torch.equal(found[name], tensor), name
        assert found[name].stride() == tensor.contiguous().stride() or name == "turned"
    assert found["tied"].data_ptr() == found["whole"].data_ptr()
    found["whole"].zero_()
    assert torch.equal(read(packed)["whole"], base)
    base.zero_()
    assert torch.equal(read(packed)["row"], torch.arange(3000.0, 4000.0)), (
        "the lent copy is no one's"
    )


def test_the_lender_reads_its_own_without_a_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeMemory, "read", None)
    sent = torch.nn.Parameter(torch.randn(5, 3, dtype=torch.float64))
    packed, lending = lent([sent, torch.empty(0)])
    found, empty = read(packed)
    assert isinstance(found, torch.nn.Parameter)
    assert torch.equal(found, sent)
    assert found.data_ptr() != lending.copies[0].data_ptr()
    assert empty.numel() == 0
    lending.revoke()
    gc.collect()
    with pytest.raises(ObjectLostError, match="was freed with its object"):
        read(packed)


def test_a_loan_that_outlives_its_memory_is_an_error_and_not_what_lies_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        as_another(patch)
        packed, lending = lent(torch.ones(10))
    [memory] = lending.copies
    assert torch.equal(read(packed), torch.ones(10))
    lending.revoke()
    memory[:40] = 7  # somebody else's, later
    with pytest.raises(ObjectLostError, match="keep a ref to the object"):
        read(packed)


def test_a_lender_that_has_ended_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        as_another(patch, parent=False)
        packed, _ = lent(torch.ones(10))
    with pytest.raises(ObjectLostError, match=r"process \d+ is gone: the process has ended"):
        read(packed)


def test_a_lender_that_ends_while_it_is_read_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        other = Lender(pid_namespace(), child.pid, start_time(child.pid))
        with monkeypatch.context() as patch:
            patch.setattr(cuda_ipc, "_this_process", lambda: other)
            packed, _ = lent(torch.ones(10))
        assert torch.equal(read(packed), torch.ones(10))
        whole_read = FakeMemory.read

        def dies(self: FakeMemory, *place: Any) -> Any:
            found = whole_read(self, *place)
            child.kill()
            child.wait()
            return found

        monkeypatch.setattr(FakeMemory, "read", dies)
        with pytest.raises(ObjectLostError, match="has ended"):
            read(packed)


def test_a_reader_elsewhere_is_told_where_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Lender("another machine", os.getppid(), start_time(os.getppid()))
    with monkeypatch.context() as patch:
        patch.setattr(cuda_ipc, "_this_process", lambda: other)
        packed, _ = lent(torch.ones(10))
    with pytest.raises(SerializationError, match="another machine or container") as caught:
        read(packed)
    assert caught.value.field == "tensor_transport"


def test_without_a_driver_the_error_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a driver")
    loan = Loan(
        Lender(pid_namespace(), os.getppid(), start_time(os.getppid())),
        cuda_ipc.Mapping("GPU-0", bytes(64), 0),
        bytes(16),
        8,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_ipc, "CudaIpcMemory", FakeMemory.__base__)
        with pytest.raises(SerializationError, match="there is no driver"):
            cuda_ipc.borrow(loan)
