"""Loads the Triton kernels interpreted, for this folder, and leaves the process as it was.

``TRITON_INTERPRET`` counts at decoration, so it is set only while the kernels are imported, after
collection and before the first test: subprocesses and other folders of the same run do not see it.
Without Triton the tests that need the interpreter skip, with the reason; where it is there and does not
run, they fail.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.kernels._interpreter import remember_builtins, round_to_fp8

if TYPE_CHECKING:
    from collections.abc import Iterator

NO_TORCH = (
    None if find_spec("torch") else "the kernel tests need torch: pip install 'stoker[train]'"
)
PACKAGE = Path(__file__).parents[2] / "kernels/stoker_kernels"
# Wherever kernels are decorated.
KERNEL_MODULES = [
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    for path in sorted(PACKAGE.rglob("*.py"))
    if "@triton.jit" in path.read_text()
]


def _load_interpreted() -> str | None:
    """Import every kernel under the interpreter; the reason why not, or None."""
    if NO_TORCH:
        return NO_TORCH
    if "triton" in sys.modules:
        return "triton was imported, compiled, before these tests ran: run tests/kernels alone"
    if find_spec("triton") is None:
        return "triton is not installed: pip install --no-deps 'triton==3.7.*'"
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        for name in KERNEL_MODULES:
            import_module(name)
        remember_builtins()
        round_to_fp8()
        import torch

        # The first launch imports more of Triton, which looks at the variable again.
        rms_norm = import_module("stoker_kernels.ops.rms_norm.triton")
        rms_norm.rms_norm_fwd(torch.ones(1, 1), None, torch.ones(1), 1e-6)
    except (ImportError, RuntimeError) as error:
        return f"Triton's interpreter does not run here: {error}"
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
    return None


NO_INTERPRETER = pytest.StashKey[str | None]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Load the kernels before any test runs, but not where none of this folder will (``-m gpu``)."""
    here = Path(__file__).parent
    if any(here in item.path.parents for item in session.items):
        session.config.stash[NO_INTERPRETER] = _load_interpreted()


def pytest_pycollect_makemodule(module_path: Path) -> None:
    """Skip the files of this folder, which import torch, where there is none."""
    if NO_TORCH:
        pytest.skip(NO_TORCH, allow_module_level=True)


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)  # tests run side by side, and waiting threads would spin
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _new_memory_is_nan() -> Iterator[None]:
    """A read of memory that nobody has written shows on every machine."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def interpreter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the Triton kernels on CPU tensors for this test."""
    reason = request.config.stash[NO_INTERPRETER]
    if reason:
        (pytest.fail if find_spec("triton") else pytest.skip)(reason)
    monkeypatch.setenv("STOKER_KERNELS_BACKEND", "triton")


@pytest.fixture(params=["cpu", "reference", "triton"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each implementation in turn: fast CPU path, specification, interpreted kernel."""
    name: str = request.param
    if name == "triton":
        request.getfixturevalue("interpreter")
    else:
        monkeypatch.setenv("STOKER_KERNELS_BACKEND", {"cpu": "auto"}.get(name, name))
    return name
