"""CUDA tensors as values: through host memory, back to the same GPU, or to what the reader has.

Run with ``pytest -m gpu tests/gpu``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch (the `train` extra)")

import stoker  # noqa: E402
from stoker.runtime.serialization.pickling import pack, unpack  # noqa: E402
from tests.unit.sdk.packing import inline, stored, travel  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
    pytest.mark.timeout(120),
]


def on_gpu() -> Any:
    return torch.arange(100_000, dtype=torch.float32, device="cuda").reshape(100, 1000)


VIEWS = {
    "whole": lambda b: b,
    "bf16": lambda b: b.bfloat16(),
    "fp8": lambda b: b.to(torch.float8_e4m3fn),
    "complex, conj": lambda b: torch.complex(b, b).conj(),
    "row": lambda b: b[3],
    "column": lambda b: b[:, 7],
    "transposed": lambda b: b.T,
    "repeated": lambda b: b[0].expand(50, 1000),
    "element": lambda b: b[5, 5],
    "empty": lambda b: b[5:5],
    "parameter": lambda b: torch.nn.Parameter(b),
}


def plain(tensor: Any) -> Any:
    tensor = tensor.detach().resolve_conj().cpu()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor.float()


@pytest.mark.parametrize("lay", [stored, inline])
@pytest.mark.parametrize("name", VIEWS)
def test_a_cuda_tensor_comes_back_to_its_gpu(name: str, lay: Any) -> None:
    sent = VIEWS[name](on_gpu())
    found = travel(sent, lay)
    assert type(found) is type(sent)
    assert (found.device, found.dtype, found.shape) == (sent.device, sent.dtype, sent.shape)
    assert found.requires_grad == sent.requires_grad
    # Beyond 448 an fp8 value is NaN.
    torch.testing.assert_close(plain(found), plain(sent), rtol=0, atol=0, equal_nan=True)


def test_a_view_ships_its_own_bytes_only() -> None:
    assert sum(b.nbytes for b in pack(on_gpu()[3], what="value").buffers) == 4000
    assert sum(b.nbytes for b in pack(on_gpu()[:, 7], what="value").buffers) == 400


def test_what_was_computed_on_another_stream_is_whole_once_it_is_waited_for() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        sent = torch.ones(4096, 4096, device="cuda")
        for _ in range(20):
            sent = sent @ torch.eye(4096, device="cuda")
        found = travel(sent)
    assert torch.equal(found, torch.ones_like(found))


def test_a_model_keeps_its_ties_on_the_gpu() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).cuda()
    model[1].weight = model[0].weight
    state = travel(model.state_dict())
    assert state["0.weight"].data_ptr() == state["1.weight"].data_ptr()
    found = travel(model)
    assert found[1].weight is found[0].weight
    found(torch.ones(2, 4, device="cuda")).sum().backward()


IMPORT_UNPACK = "from stoker.runtime.serialization.pickling import unpack"


def read_elsewhere(packed: Any, script: str, **env: str) -> str:
    buffers = [bytes(b) for b in packed.buffers]
    read = f"found = unpack({packed.data!r}, {buffers!r}, what='value')"
    done = subprocess.run(
        [sys.executable, "-c", f"import torch\n{IMPORT_UNPACK}\n{read}\n{script}"],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_where_no_gpu_is_seen_it_stays_in_host_memory() -> None:
    packed = pack(on_gpu()[0, :5], what="value")
    out = read_elsewhere(packed, "print(found.device, found.tolist())", CUDA_VISIBLE_DEVICES="")
    assert out == "cpu [0.0, 1.0, 2.0, 3.0, 4.0]\n"


def test_a_cpu_tensor_does_not_wake_cuda() -> None:
    packed = pack(torch.ones(3), what="value")
    assert read_elsewhere(packed, "print(torch.cuda.is_initialized())") == "False\n"


def test_another_process_reads_it_onto_the_same_gpu() -> None:
    packed = pack(on_gpu()[0, :5], what="value")
    uuid = torch.cuda.get_device_properties(0).uuid
    script = "print(torch.cuda.get_device_properties(found.device).uuid, found.sum().item())"
    assert read_elsewhere(packed, script) == f"{uuid} 10.0\n"


def test_the_sender_may_go_on_writing() -> None:
    sent = on_gpu()
    packed = pack(sent, what="value")
    sent.zero_()
    found = unpack(packed.data, stored(packed), what="value")
    assert torch.equal(found, on_gpu())


def lend(value: Any) -> tuple[Any, Any]:
    from stoker.runtime.serialization.cuda_ipc import CudaIpcMemory, Lending

    lending = Lending(CudaIpcMemory())
    return pack(value, what="value", lend=lending.lend), lending


def test_another_process_copies_lent_memory() -> None:
    packed, lending = lend({"all": on_gpu(), "row": on_gpu()[3].bfloat16()})
    assert len(lending.copies) == 2
    assert packed.nbytes < 10_000
    script = "print(found['all'].device, found['all'].sum().item(), found['row'].sum().item())"
    expected = on_gpu()
    sums = f"{expected.sum().item()} {expected[3].bfloat16().sum().item()}"
    assert read_elsewhere(packed, script) == f"cuda:0 {sums}\n"
    del lending


def test_a_gibibyte_is_read_at_the_speed_of_a_copy() -> None:
    packed, lending = lend(torch.zeros(1 << 28, dtype=torch.float32, device="cuda"))
    script = """
import time
def seconds(call):
    call(); torch.cuda.synchronize()
    began = time.perf_counter(); call(); torch.cuda.synchronize()
    return time.perf_counter() - began
data = DATA
read = min(seconds(lambda: unpack(data, [], what="value")) for _ in range(5))
copy = min(seconds(lambda: found.clone()) for _ in range(5))
print(f"{copy / read:.2f} of a copy: {2 * found.nbytes / read / 1e9:.0f} GB/s")
""".replace("DATA", repr(packed.data))
    sys.stdout.write(read_elsewhere(packed, script))
    del lending


@stoker.remote(num_gpus=1)
def make(count: int) -> Any:
    return torch.full((count,), 2.0, device="cuda")


def test_the_result_of_a_gpu_task_reaches_the_driver(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("STOKER_SESSION_ROOT", str(tmp_path))
    stoker.init(num_cpus=1)
    try:
        for count in (10, 1 << 20):
            found = stoker.get(make.remote(count), timeout=100)
            assert found.is_cuda
            assert float(found.sum()) == 2.0 * count
    finally:
        stoker.shutdown()
