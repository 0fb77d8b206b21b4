"""What Stoker lacks of Ray says so, and names the way; the rest is imported without anything heavy."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import stoker.ray as ray
from stoker.exceptions import StokerError
from stoker.ray.mapping.lacking import LACKING, NotInStokerError, reason


@pytest.mark.parametrize("library", ["tune", "serve", "data", "rllib", "train", "workflow"])
def test_libraries_are_out_of_scope(library: str) -> None:
    with pytest.raises(NotInStokerError, match=f"ray.{library} is not in Stoker"):
        getattr(ray, library)
    with pytest.raises(ImportError):
        exec(f"from stoker.ray import {library}")


def test_each_reason_is_found_by_what_is_below_as_well() -> None:
    assert all(reason(f"{name}.more") for name in LACKING)
    assert reason("get") is None
    assert reason("util.queue.Queue") is None


def test_an_unknown_name_is_a_plain_attribute_error() -> None:
    assert not hasattr(ray, "nothing_of_this_name")
    for module in ("actor", "dag", "exceptions", "util.state", "util.accelerators"):
        assert not hasattr(importlib.import_module(f"stoker.ray.{module}"), "nothing_of_this_name")


def test_all_exceptions_are_stokers() -> None:
    exceptions = ray.exceptions
    not_ours = {"AsyncioActorExit", "ObjectRefStreamEndOfStreamError"}
    for name in set(exceptions.__all__) - not_ours:
        assert issubclass(getattr(exceptions, name), StokerError)
    assert issubclass(exceptions.ActorDiedError, exceptions.RayActorError)
    assert issubclass(exceptions.ActorUnavailableError, exceptions.RayActorError)


def test_importing_it_loads_nothing_heavy() -> None:
    program = (
        "import sys, stoker.ray, stoker.ray.util; "
        "print(*{'aiohttp', 'numpy', 'torch', 'cloudpickle'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.split() == []
