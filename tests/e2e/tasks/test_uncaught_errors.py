"""What a user reads on the terminal when nobody catches an error of ours."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

HEAD = """
import time
import stoker
stoker.init(num_cpus=1, num_gpus=0)

@stoker.remote(num_cpus=1)
def train(s):
    time.sleep(s)

"""


@pytest.mark.parametrize(
    ("call", "lines"),
    [
        (
            "stoker.get([train.remote(60), train.remote(0)], timeout=1)",
            (
                r"stoker\.exceptions\.GetTimeoutError: get\(\) waited 1 s for 2 of 2 objects\.\n"
                r"o_\S+ of \S*train \(t_\w+\): it [^\n]+\n"
                r"o_\S+ of \S*train \(t_\w+\): it [^\n]+\n"
                r"why: \S*train: [^\n]+\n"
                r"more: stoker explain t_\w+"
            ),
        ),
        (
            "stoker.get(train.options(num_cpus=64).remote(0), timeout=60)",
            (
                r"stoker\.exceptions\.InfeasibleError: task \S*train \(t_\w+\): 64 CPU "
                r"for '\S*train' fits on none of 1 node, even when idle( \(for \d+ s\))?\.\n"
                r"  n_\w+: needs 64 CPU[^\n]+\n"
                r"to start it: start a node with 64 CPU[^\n]+"
            ),
        ),
    ],
)
def test_an_uncaught_error_ends_with_its_name_a_sentence_and_the_evidence(
    driver: Callable[..., subprocess.CompletedProcess[str]], call: str, lines: str
) -> None:
    done = driver(HEAD + call)
    assert done.returncode == 1
    assert re.search("\n" + lines + "\n$", done.stderr), done.stderr
    assert "stoker_wire" not in done.stderr.rpartition("stoker.exceptions.")[2]
