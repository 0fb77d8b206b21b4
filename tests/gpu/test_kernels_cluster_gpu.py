"""Kernels on a cluster with a real GPU: what is compiled ahead is what is launched, and tuning finds its way.

Run with ``pytest -m gpu tests/gpu``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="the kernel tests need torch (the `train` extra)")

import stoker  # noqa: E402
from stoker.train import autotune  # noqa: E402
from tests.e2e import _cluster  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
    pytest.mark.timeout(600),
]
SPEC = {"op": "rms_norm", "dtype": "bfloat16", "rows": 512, "columns": 1024}


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("k")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_KERNEL_CACHE_DIR", str(folder / "cache"))
        with _cluster.embedded(folder, num_cpus=2, num_gpus=1):
            yield


@stoker.remote(num_gpus=1, max_calls=1)
def launched() -> list[bool]:
    """Run the step on the GPU; for each kernel whether Triton's cache had it."""
    from triton import knobs

    from stoker_kernels.workloads import workload

    found: list[bool] = []

    def heard(*, cache_hit: bool, **_: Any) -> None:
        found.append(cache_hit)

    knobs.compilation.listener = heard
    sizes = {name: size for name, size in SPEC.items() if isinstance(size, int)}
    workload("rms_norm").call("cuda", torch.bfloat16, **sizes)
    torch.cuda.synchronize()
    return found


def test_a_launch_finds_what_was_compiled_ahead() -> None:
    assert stoker.nodes()[0]["devices"][0]["arch"] >= 80
    named = launched.options(runtime_env={"kernels": [SPEC]})
    found = stoker.get(named.remote(), timeout=300)
    assert len(found) >= 2 and all(found)


def test_tuning_measures_on_the_gpu_and_its_table_is_compiled_and_launched() -> None:
    kept = autotune("rms_norm", dtype="bfloat16", rows=512, columns=1024, time_limit=60)
    assert {record.kernel for record in kept} == {"rms_norm_fwd", "rms_norm_bwd"}
    assert all(record.device == stoker.nodes()[0]["devices"][0]["name"] for record in kept)
    named = launched.options(runtime_env={"kernels": [SPEC]})
    assert all(stoker.get(named.remote(), timeout=300))
