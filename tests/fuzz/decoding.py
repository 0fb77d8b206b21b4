"""Runs of the decoders' fuzzing in child processes, as many at once as there are cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tests.fuzz.child import NUMBER
from tests.fuzz.decoders import DECODERS
from tests.fuzz.findings import Finding, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

REPOSITORY = Path(__file__).parents[2]
LONGEST_S = 7200.0
"""A child ends by its own limits long before."""


def fuzz_in_child(names: Sequence[str], *, seed: int, inputs: int, first: int = 0) -> list[Outcome]:
    """Give each of some decoders ``inputs`` inputs, from number ``first`` on, in one process.

    If one ends the process, that is a finding, and the rest are fuzzed in another.
    """
    with tempfile.TemporaryDirectory(prefix="stoker-fuzz-") as folder:
        progress = Path(folder) / "number"
        progress.write_bytes(NUMBER.pack(first))
        numbers = map(str, (seed, first, inputs, progress))
        done = subprocess.run(
            [sys.executable, "-m", "tests.fuzz.child", ",".join(names), *numbers],
            cwd=REPOSITORY,
            env={**os.environ, "TMPDIR": folder, "PYTHONHASHSEED": "0"},
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
            check=False,
        )
        (number,) = NUMBER.unpack(progress.read_bytes())
    lines = done.stdout.splitlines()
    outcomes = [_outcome(name, seed, line) for name, line in zip(names, lines, strict=False)]
    if done.returncode:
        name, *rest = names[len(lines) :]
        text = f"the process ended with {done.returncode} at input {number}: {done.stderr[-2000:]}"
        outcomes.append(
            Outcome(name, number - first, 0.0, [Finding(text, repeat(name, seed, number))])
        )
        if rest:
            outcomes += fuzz_in_child(rest, seed=seed, inputs=inputs, first=first)
    return outcomes


def _outcome(name: str, seed: int, line: str) -> Outcome:
    said = json.loads(line)
    findings = [
        Finding(
            f"{one['text']}, {one['times']} times, first input {one['number']}: {one['input']}",
            repeat(name, seed, one["number"]),
        )
        for one in said["findings"]
    ]
    return Outcome(name, said["inputs"], said["seconds"], findings)


def repeat(name: str, seed: int, number: int) -> str:
    """Return the command that gives one input again."""
    return f"python -m tests.fuzz --only {name} --seed {seed} --first {number} --inputs 1"


def fuzz_decoders(names: Iterable[str], *, seed: int, inputs: int, first: int = 0) -> list[Outcome]:
    """Fuzz several decoders, each in a process of its own."""
    known = [[name] for name in DECODERS if name in set(names)]
    one = partial(fuzz_in_child, seed=seed, inputs=inputs, first=first)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return [outcome for outcomes in pool.map(one, known) for outcome in outcomes]
