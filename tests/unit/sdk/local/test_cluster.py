"""What is asked of a head or a node becomes its command line, and an unknown name starts nothing."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.local.cluster import _arguments, spawn_local
from stoker.local.options import json_object, parser


def test_a_spec_is_read_as_it_was_written() -> None:
    arguments = _arguments(
        {"num_cpus": 2.5, "resources": {"disk": 1}, "labels": {}, "host": None, "session_dir": "s"}
    )
    line = [f"--{name}={value}" for name, value in arguments.items() if value is not None]
    read = parser().parse_args(["head", *line])
    assert (read.num_cpus, read.num_gpus, read.host, read.port) == (2.5, None, None, 0)
    assert json_object("resources", read.resources) == {"disk": 1}
    assert (read.labels, read.session_dir) == (None, None)


def test_an_unknown_name_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.Popen", None)
    unknown: dict[str, Any] = {"num_cpu": 1}
    with pytest.raises(TypeError, match="unexpected keyword argument 'num_cpu'"):
        spawn_local(**unknown)
