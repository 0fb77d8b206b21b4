"""The text that the training example learns: the source code of Python's standard library."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import numpy as np

HELD_OUT = 20  # one file of so many is for validation


def read_source() -> tuple[np.ndarray, np.ndarray]:
    """Return the standard library's source as bytes, without tests: (to train on, held out)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    others = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages"}
    paths = sorted(
        (path.relative_to(root).as_posix(), path)
        for path in root.rglob("*.py")
        if others.isdisjoint(path.relative_to(root).parts)
    )
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for number, (_, path) in enumerate(paths):
        parts[number % HELD_OUT == HELD_OUT - 1].append(path.read_bytes())
    text, held_out = (np.frombuffer(b"".join(part), np.uint8) for part in parts)
    print(
        f"text: {len(paths)} files of Python {sys.version.split()[0]}'s standard library, "
        f"{len(text) / 1e6:.1f} MB to train on, {len(held_out) / 1e6:.1f} MB held out"
    )
    return text, held_out
