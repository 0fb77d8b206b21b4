"""Optimizers on FSDP2's DTensors, in four real processes over gloo on loopback; plain and hybrid sharding."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker_kernels.optim.hyper import adam_hyper, sgd_hyper
from stoker_kernels.optim.ops import TRUST_SQUARES, UPDATES
from stoker_kernels.optim.reference import TRUST

WORKER = Path(__file__).with_name("fsdp_worker.py")
WORKERS = 4
PAIRS = ("adamw", "adam", "sgd", "adagrad", "adadelta", "rmsprop")
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the processes found, by case: (ours, the expected)."""
    folder = tmp_path_factory.mktemp("fsdp")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment.pop("STOKER_KERNELS_BACKEND", None)
    environment.pop("TRITON_INTERPRET", None)
    logs = [folder / f"{rank}.log" for rank in range(WORKERS)]
    processes = []
    try:
        for rank, log in enumerate(logs):
            with log.open("wb") as output:
                arguments = [str(rank), str(WORKERS), str(folder / "meet"), str(folder)]
                processes.append(
                    subprocess.Popen(
                        [sys.executable, str(WORKER), *arguments],
                        env=environment, stdout=output, stderr=subprocess.STDOUT,
                    )
                )  # fmt: skip
        for process in processes:
            code = process.wait(timeout=300)
            assert code == 0, "\n".join(log.read_text() for log in logs)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    found: dict[str, Any] = torch.load(folder / "results.pt", weights_only=True)
    return found


def assert_alike(pair: list[list[torch.Tensor]]) -> None:
    for ours, theirs in zip(*pair, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", PAIRS)
def test_20_steps_are_torch_s(results: dict[str, Any], name: str) -> None:
    assert_alike(results[name])


@pytest.mark.parametrize("mesh", ["line", "square"])
@pytest.mark.parametrize("name", ["adamw_clipped", "sgd_clipped", "lamb", "lars", "lamb_clipped"])
def test_clipping_and_trust_ratios_are_of_whole_tensors(
    results: dict[str, Any], mesh: str, name: str
) -> None:
    assert_alike(results[f"{mesh}_{name}"])


@pytest.mark.parametrize("mesh", ["line", "square"])
@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb", "lars"])
def test_norms_are_of_whole_gradients(results: dict[str, Any], mesh: str, name: str) -> None:
    assert_alike(results[f"{mesh}_{name}_norms"])


@pytest.mark.parametrize("mesh", ["line", "square"])
def test_shards_round_by_bits_of_their_own(results: dict[str, Any], mesh: str) -> None:
    shards = results[f"{mesh}_rounded"].chunk(4 if mesh == "line" else 2)
    assert all(0.1 < (shard < 1.0).float().mean() < 0.9 for shard in shards)
    assert not torch.equal(shards[0], shards[1])


def test_a_checkpoint_goes_on_bit_for_bit(results: dict[str, Any]) -> None:
    for ours, loaded in zip(*results["stored"], strict=True):
        assert torch.equal(ours, loaded)
    assert_alike(results["moved"])


def test_the_step_in_backward(results: dict[str, Any]) -> None:
    """The same bits, and the same sums, though in several buckets."""
    for name in ("in_backward", "in_backward_sums"):
        for ours, other in zip(*results[name], strict=True):
            assert torch.equal(ours, other)


def test_a_plain_checkpoint_is_refused(results: dict[str, Any]) -> None:
    assert "is a plain tensor, its parameter is a DTensor" in results["refusals"]["load"]
    assert "set_optimizer_state_dict" in results["refusals"]["load"]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in lanes that are masked
@pytest.mark.parametrize("rule", ["lamb", "lars"])
def test_two_shards_of_a_tensor_move_as_the_whole(backend: str, rule: str) -> None:
    """The ops under it, where the kernels run too: measure the shards, add, update each."""
    states = TRUST[rule] - 1
    group = {
        "betas": (0.9, 0.99), "weight_decay": 0.1, "eps": 1e-6, "maximize": False, "momentum": 0.9,
        "trust_coefficient": 0.01,
    }  # fmt: skip
    numbers = adam_hyper(group, 0.1, decoupled=True) if rule == "lamb" else sgd_hyper(group, 0.1)
    hyper = torch.tensor(numbers, dtype=torch.float32)
    whole = [torch.randn(700) for _ in range(2)] + [torch.rand(700) for _ in range(states)]
    shards = [[t[:300].clone(), t[300:].clone(), t[:0].clone()] for t in whole]
    scale = torch.tensor(4.0)

    def arguments(columns: list[list[torch.Tensor]]) -> tuple[Any, ...]:
        p, g, *rest = columns
        steps = [torch.tensor(2.0) for _ in p]
        return (p, g, rest[0], rest[1] if len(rest) > 1 else [], steps, hyper, scale)

    plain = [[t.clone()] for t in whole]
    sums = UPDATES[rule](*arguments(plain), None, None, None, None)
    parts = arguments(shards)
    before = [[t.clone() for t in column] for column in shards]
    squares = TRUST_SQUARES(rule, *parts)
    assert squares.shape == (TRUST[rule], 3)
    assert all(
        torch.equal(*pair)
        for c in zip(before, shards, strict=True)
        for pair in zip(*c, strict=True)
    )
    assert parts[4][0] == 2.0
    together = squares.sum(1, keepdim=True).expand(-1, 3)
    own = UPDATES[rule](*parts, None, None, None, together)
    for column, (expected,) in zip(shards, plain, strict=True):
        torch.testing.assert_close(torch.cat(column), expected)
    assert parts[4][0] == 3.0
    torch.testing.assert_close(own.sum()[None], sums)
