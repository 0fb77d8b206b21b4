"""What a training driver shows and keeps: progress, the loss curve, files that are replaced whole."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path


class Progress:
    """One line that is written over on a terminal, else a line every so many steps."""

    def __init__(self, *, total: int, batch_bytes: int, every: int) -> None:
        self._total, self._batch_bytes, self._every = total, batch_bytes, every
        self._live = sys.stdout.isatty()
        self._recent: list[tuple[float, float]] = []

    def show(self, report: dict[str, Any]) -> None:
        """Take in a step's report."""
        step, total = report["step"], self._total
        self._recent = [*self._recent[-24:], (report["loss"], report["step_s"])]
        loss, step_s = (sum(part) / len(part) for part in zip(*self._recent, strict=True))
        if not self._live and step % self._every and step not in (1, total):
            return
        rate = self._batch_bytes / step_s
        left_s = (total - step) * step_s
        line = (
            f"step {step:4}/{total}  loss {loss:.3f}  {rate / 1e3:5.1f} kB/s  {left_s:4.0f} s left"
        )
        if self._live:
            full = 24 * step // total
            print(f"\r[{'█' * full}{'·' * (24 - full)}] {line}", end="", flush=True)
        else:
            print(line, flush=True)

    def end(self) -> None:
        """Leave the line that was written over."""
        if self._live and self._recent:
            print()


def plot(metrics: dict[str, Any], path: Path) -> Path | None:
    """Draw the loss curve to a PNG; None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print("no loss curve: matplotlib is not installed")
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    losses = np.array(metrics["losses"])
    width = min(25, len(losses))
    smooth = np.convolve(losses, np.ones(width) / width, "valid")
    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=120)
    axes.plot(np.arange(1, len(losses) + 1), losses, color="#b8c4d8", lw=0.8, label="each step")
    axes.plot(
        np.arange(len(smooth)) + (width + 1) / 2, smooth, color="#1f4e9c", label=f"mean of {width}"
    )
    if "validation_loss" in metrics:
        value = metrics["validation_loss"]
        axes.plot([len(losses)], [value], "o", color="#c0392b", label=f"held out: {value:.3f}")
    axes.set(
        xlabel="step", ylabel="loss (nats per byte)", title="Byte-level GPT on Python's source"
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    temporary = path.with_suffix(".tmp")
    figure.savefig(temporary, format="png")
    pyplot.close(figure)
    os.replace(temporary, path)
    return path


def readable(sample: bytes) -> str:
    """Return what a model wrote as text that no terminal takes for commands, without empty lines."""
    text = sample.decode(errors="replace")
    shown = "".join(c if c.isprintable() or c == "\n" else "·" for c in text)
    return "\n".join(line.rstrip() for line in shown.splitlines() if line.strip())


def write(path: Path, content: bytes) -> None:
    """Replace a file at once: a reader or a crash meets the old one or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
