"""Making groups: what is refused before anybody is asked, and what importing costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from stoker.exceptions import BadRequestError, NotFoundError
from stoker_train.collective import joining


def test_importing_it_loads_nothing_heavy() -> None:
    program = (
        "import sys, stoker.collective, stoker.ray.util.collective as col, stoker; "
        "stoker.collective.join, col.allreduce, col.types; "
        "assert not stoker.collective.is_initialized(); "
        "print(*{'aiohttp', 'numpy', 'torch', 'triton'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert set(done.stdout.split()) <= {"aiohttp"}  # of the runtime, as all that talks has


def test_what_cannot_be_a_group_is_refused_before_anybody_is_asked() -> None:
    for rank, size in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(BadRequestError, match="has no rank"):
            joining.join("g", rank=rank, world_size=size)
    for wrong in ({"timeout_s": 0}, {"stall_s": -1.0}):
        with pytest.raises(BadRequestError, match="must be positive"):
            joining.join("g", rank=0, world_size=1, **wrong)
    with pytest.raises(BadRequestError, match="give one or more"):
        joining.init_group([])


def test_a_group_that_is_not_there_says_how_to_make_it() -> None:
    assert not joining.is_initialized("g")
    joining.destroy_group(name="g")
    with pytest.raises(NotFoundError, match=r"stoker\.collective\.init_group\(actors\)"):
        joining.group("g")
