"""Runs of the decoders' fuzzing: one child process per decoder, as many at once as there are cores."""

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
    from collections.abc import Iterable

REPOSITORY = Path(__file__).parents[2]
LONGEST_S = 7200.0
"""A child ends by its own limits long before."""


def fuzz_decoder(name: str, *, seed: int, inputs: int, first: int = 0) -> Outcome:
    """Give ``inputs`` inputs to a decoder, from number ``first`` on."""
    with tempfile.TemporaryDirectory(prefix="stoker-fuzz-") as folder:
        progress = Path(folder) / "number"
        progress.write_bytes(NUMBER.pack(first))
        done = subprocess.run(
            [sys.executable, "-m", "tests.fuzz.child", name, *map(str, (seed, first, inputs, progress))],
            cwd=REPOSITORY,
            env={**os.environ, "TMPDIR": folder, "PYTHONHASHSEED": "0"},
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
            check=False,
        )  # fmt: skip
        (number,) = NUMBER.unpack(progress.read_bytes())
    if done.returncode:
        text = f"the process ended with {done.returncode} at input {number}: {done.stderr[-2000:]}"
        return Outcome(name, number - first, 0.0, [Finding(text, repeat(name, seed, number))])
    said = json.loads(done.stdout.splitlines()[-1])
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


def fuzz_decoders(
    names: Iterable[str], *, seed: int, inputs: int, first: int = 0, workers: int = 0
) -> list[Outcome]:
    """Fuzz several decoders."""
    known = [name for name in DECODERS if name in set(names)]
    one = partial(fuzz_decoder, seed=seed, inputs=inputs, first=first)
    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        return list(pool.map(one, known))
