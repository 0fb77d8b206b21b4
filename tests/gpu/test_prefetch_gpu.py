"""Batches that a thread copies to the GPU: whole, whatever the consumer's stream does.

Run with ``pytest -m gpu tests/gpu``.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs torch (the `train` extra)")

import stoker  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
    pytest.mark.timeout(120),
]


def test_batches_are_on_the_gpu_and_whole() -> None:
    size = 1 << 22
    batches = ({"x": torch.full((size,), float(n)), "n": n} for n in range(50))
    sums = []
    for number, batch in enumerate(stoker.data.prefetch(batches, device="cuda", depth=3)):
        assert batch["x"].is_cuda
        assert batch["n"] == number
        sums.append(batch["x"].sum())
    assert [float(one) / size for one in sums] == list(range(50))
