"""The DDP hook in real processes over gloo on loopback, and the fused exchange it uses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker_kernels.compression import COMPRESSORS, GradientExchange, HookState, make_compressor

WORKER = Path(__file__).with_name("ddp_worker.py")
WORKERS = 2
N = 16 * 32 + 32 + 32 * 4 + 4


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """What each worker saved, by method. The rendezvous is a file: no port to race for."""
    folder = tmp_path_factory.mktemp("ddp")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment.pop("STOKER_KERNELS_BACKEND", None)
    environment.pop("TRITON_INTERPRET", None)
    outs = [folder / f"{rank}.pt" for rank in range(WORKERS)]
    methods = ",".join(COMPRESSORS)
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(WORKERS), str(folder / "meet"), str(out), methods],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank, out in enumerate(outs)
    ]  # fmt: skip
    try:
        for process in processes:
            output, _ = process.communicate(timeout=150)
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()
            process.wait()
    saved = [torch.load(out, weights_only=True) for out in outs]
    assert [worker["threads_left"] for worker in saved] == [[], []], "they may abort the exit"
    return [worker["results"] for worker in saved]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("method", list(COMPRESSORS))
def test_two_processes_train_alike(method: str, trained: list[dict[str, Any]]) -> None:
    first, second = (worker[method] for worker in trained)
    for name, parameter in first["parameters"].items():
        assert torch.equal(parameter, second["parameters"][name]), name
        assert torch.equal(first["gradients"][name], second["gradients"][name]), name
    assert first["names"] == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert first["steps"] == 40
    assert first["losses"][-1] < 0.6 * first["losses"][0]
    dense = 40 * 4 * N
    assert first["sent_nbytes"] == second["sent_nbytes"]
    if method in ("none", "adasum"):
        assert first["sent_nbytes"] == dense
    else:
        assert first["sent_nbytes"] < 0.8 * dense


@pytest.mark.timeout(200)
@pytest.mark.parametrize("method", ["topk", "powersgd"])
def test_messages_travel_beside_the_backward_pass(
    method: str, trained: list[dict[str, Any]]
) -> None:
    """And nothing else changes: not a bit, not a byte, not the number of collectives."""
    for worker in trained:
        overlapped, waiting = (worker[f"{method}, {how}"] for how in ("overlapped", "waiting"))
        order = overlapped["order"]
        # The last layer's bucket leaves before the first layer's gradient exists; waits come after it.
        assert order.index("start") < order.index("first layer") < order.index("wait")
        order = waiting["order"]
        assert order.index("wait") < order.index("first layer")
        assert sorted(order) == sorted(overlapped["order"])
        assert overlapped["sent_nbytes"] == waiting["sent_nbytes"]
        for name, parameter in overlapped["parameters"].items():
            assert torch.equal(parameter, waiting["parameters"][name])


class _Alone:
    """A group of one worker that counts its collectives."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, torch.dtype]] = []

    def mean_(self, buffer: torch.Tensor) -> None:
        self.calls.append(("mean", buffer.dtype))

    def gather(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        self.calls.append(("gather", buffer.dtype))
        return [buffer]


@pytest.mark.parametrize("method", list(COMPRESSORS))
def test_one_exchange_fuses_many_tensors_and_equals_each_alone(method: str) -> None:
    group = _Alone()
    exchange = GradientExchange(make_compressor(method), group)
    gradients = {
        "matrix": torch.randn(60, 50),
        "odd": torch.randn(7).bfloat16(),  # leaves the next one's bytes unaligned
        "vector": torch.randn(33),
        "empty": torch.zeros(0, 3),
    }
    results = exchange.average(gradients)
    assert list(results) == list(gradients)
    alone = make_compressor(method)
    sent = 0
    for name, gradient in gradients.items():
        if gradient.numel():
            message = alone.compress(gradient, name)
            sent += message.nbytes
            torch.testing.assert_close(results[name], alone.decompress([message]))
        assert (results[name].shape, results[name].dtype) == (gradient.shape, gradient.dtype)
    assert exchange.sent_nbytes == sent
    rounds = 2 if method in ("powersgd", "csc") else 1
    assert len(group.calls) <= 2 * rounds  # one per round and dtype


def test_a_parameter_without_a_name_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 1)
    parameter = torch.nn.Parameter(torch.ones(3))
    state = HookState(make_compressor("none"), [("weight", parameter)])
    assert state.name_of(parameter) == "weight"
    with pytest.raises(KeyError, match=r"shape \(2,\) is none of the named_parameters"):
        state.name_of(torch.ones(2))
