"""Models with our kernels under DDP and FSDP2, in two real processes over gloo, and with LoRA."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("parallel_worker.py")
WORKERS = 2


@pytest.mark.timeout(500)
def test_training_goes_as_without_kernels(tmp_path: Path, seed: int) -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment.pop("STOKER_KERNELS_BACKEND", None)
    environment.pop("TRITON_INTERPRET", None)
    logs = [tmp_path / f"{rank}.log" for rank in range(WORKERS)]
    processes = []
    try:
        for rank, log in enumerate(logs):
            arguments = [str(rank), str(WORKERS), str(tmp_path / "meet"), str(seed)]
            with log.open("wb") as output:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, str(WORKER), *arguments],
                        env=environment, stdout=output, stderr=subprocess.STDOUT,
                    )
                )  # fmt: skip
        for process in processes:
            assert process.wait(timeout=400) == 0, "\n".join(log.read_text() for log in logs)
    finally:
        for process in processes:
            process.kill()
            process.wait()
