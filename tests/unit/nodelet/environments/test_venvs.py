"""The tools of virtual environments: those that a node lacks are named with the fix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stoker_nodelet.environments import venvs
from stoker_wire.errors import RuntimeEnvSetupError

if TYPE_CHECKING:
    from pathlib import Path


def test_a_node_without_uv_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    with pytest.raises(RuntimeEnvSetupError, match="pip install uv"):
        venvs.find_uv()
