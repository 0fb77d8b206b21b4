"""A large folder that is uploaded again: what has not changed does not travel, and tasks see what has."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker.runtime.net.http import HttpClient
from tests.e2e._cluster import embedded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker.api.init import ClusterInfo

FILES, NBYTES = 400, 50 << 10  # 20 MB


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterInfo]:
    with embedded(tmp_path_factory.mktemp("sessions"), num_cpus=2) as info:
        yield info


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all packages that this driver uploads."""
    sizes: list[int] = []
    call = HttpClient.call

    def counted(self: HttpClient, method: str, path: str, body: Any = None, **more: Any) -> Any:
        if method == "PUT" and path.startswith("/v1/packages/"):
            sizes.append(len(body))
        return call(self, method, path, body, **more)

    monkeypatch.setattr(HttpClient, "call", counted)
    return sizes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(FILES):
        path = tmp_path / "code" / f"part{number % 7}" / f"file{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(NBYTES))
    (tmp_path / "code/run.sh").write_text("#!/bin/sh\n")
    (tmp_path / "code/run.sh").chmod(0o755)
    return tmp_path / "code"


@stoker.remote(max_retries=0)
def seen(name: str) -> tuple[bytes, int, bool]:
    """The content of a file, how many there are, and whether ``run.sh`` can be run."""
    count = sum(path.is_file() for path in Path().rglob("*"))
    return Path(name).read_bytes(), count, os.access("run.sh", os.X_OK)


@pytest.mark.parametrize("key", ["working_dir", "py_modules"])
def test_only_what_has_changed_travels(
    cluster: ClusterInfo, folder: Path, sent: list[int], key: str
) -> None:
    def look(name: str) -> tuple[bytes, int, bool]:
        value = str(folder) if key == "working_dir" else [str(folder)]
        task = (seen if key == "working_dir" else seen_as_module).options(runtime_env={key: value})
        return stoker.get(task.remote(name), timeout=60)

    name = "part3/file3"
    assert look(name) == ((folder / name).read_bytes(), FILES + 1, True)
    total = sum(sent)
    assert total > FILES * NBYTES * 0.9
    sent.clear()
    (folder / name).write_bytes(b"changed")
    assert look(name) == (b"changed", FILES + 1, True)
    assert 0 < sum(sent) < total * 0.1
    sent.clear()
    (folder / "part2/file2").unlink()
    assert look(name) == (b"changed", FILES, True)
    assert 0 < sum(sent) < total * 0.1
    sent.clear()
    (folder / "run.sh").chmod(0o644)
    assert look(name) == (b"changed", FILES, False)
    assert 0 < sum(sent) < total * 0.1


@stoker.remote(max_retries=0)
def seen_as_module(name: str) -> tuple[bytes, int, bool]:
    """As ``seen``, of the folder ``code`` on ``sys.path``."""
    import sys

    root = next(path for one in sys.path if (path := Path(one) / "code").is_dir())
    count = sum(path.is_file() for path in root.rglob("*"))
    return (root / name).read_bytes(), count, os.access(root / "run.sh", os.X_OK)
