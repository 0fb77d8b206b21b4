"""``python -m benchmarks.kernels.compression``: below which bandwidth each gradient compressor pays.

Compressing costs time on the device and saves time on the link. With t the time that a step of a method
takes on the device, and the bytes that a worker's link carries per step
    mean (all-reduce in a ring)   2 (W - 1) / W * message
    gather                        (W - 1) * message
a method wins below bandwidth (bytes of none - bytes of the method) / t: its break-even. It counts what
travels, not what learning loses by it, and assumes that nothing overlaps with the backward pass.
Times are measured on this machine; on a GPU that is not here they are the bytes through its memory
divided by its bandwidth, and marked as calculated.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.results import device as cpu_name
from stoker_kernels.compression import Combine, Compressor, make_compressor

METHODS: tuple[tuple[str, dict[str, float]], ...] = (
    ("fp16", {}),
    ("bf16", {}),
    ("topk", {"ratio": 0.01}),
    ("dgc", {"ratio": 0.001}),
    ("sidco", {"ratio": 0.01}),
    ("onebit", {}),
    ("onebit_adam", {"freeze": 1}),
    ("powersgd", {"rank": 4}),
    ("csc", {"ratio": 0.05}),
    ("adasum", {}),
)
COLUMNS = 2048  # gradients are matrices of so many columns
H200_BYTES_PER_S = 4.8e12


@dataclass(frozen=True, slots=True)
class Cost:
    """One method for one number of workers: seconds on the device per step, and bytes on a worker's link."""

    seconds: float
    nbytes: float
    plain_nbytes: float

    @property
    def ratio(self) -> float:
        """How many times fewer bytes than plain averaging."""
        return self.plain_nbytes / self.nbytes

    @property
    def break_even(self) -> float | None:
        """Bytes per second below which it pays; None: at no bandwidth."""
        saved = self.plain_nbytes - self.nbytes
        return saved / max(self.seconds, 1e-12) if saved > 0 else None


def step(compressor: Compressor, gradient: torch.Tensor, workers: int) -> float:
    """Run one worker's part of a step, the others sending the same; return the bytes on its link."""
    rounds = compressor.exchange(gradient, "w")
    message, nbytes = next(rounds), 0.0
    while True:
        if message.combine is Combine.MEAN:
            nbytes += 2 * (workers - 1) / workers * message.nbytes
            answer = [message]
        else:
            nbytes += (workers - 1) * message.nbytes
            answer = [message] * workers
        try:
            message = rounds.send(answer)
        except StopIteration:
            return nbytes


def measure(method: str, options: dict[str, float], gradient: torch.Tensor, workers: int) -> Cost:
    """Time the fastest of some steps after two of warm-up: other programs are no part of it."""
    compressor = make_compressor(method, **options)
    times, nbytes = [], 0.0
    for _ in range(7):
        began = _now(gradient.device)
        nbytes = step(compressor, gradient, workers)
        times.append(_now(gradient.device) - began)
    plain = 2 * (workers - 1) / workers * gradient.nbytes
    return Cost(min(times[2:]), nbytes, plain)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()  # of one thread: true on a machine that others share


def memory_nbytes(method: str, options: dict[str, float], workers: int) -> float:
    """Count bytes through device memory per fp32 gradient value, pass by pass in the code."""
    ratio = options.get("ratio", 0.0)
    spread = 12 + 16 * ratio * workers  # zero, add the messages, divide
    return {
        "fp16": 12,
        "bf16": 12,
        "topk": 16 + spread,
        "dgc": 24 + spread,
        "sidco": 65 + spread,  # accumulate 12, |m| 8, one fit 27, maximum 4, count 6, select 8
        "onebit": 12 + 1 / 8 + 4 + workers / 8,
        "onebit_adam": 12 + 12 + 1 / 8 + 4 + workers / 8 + 26,  # momentum before and after
        "powersgd": 58,  # error 12, two thin products 8, rest 12, guards 22, result 4
        "csc": 60,  # accumulate 12, norms 12, clear 24, spread 12
        "adasum": 20 * (workers - 1),
    }[method]


def rate(value: float | None) -> str:
    """Format a bandwidth in bits per second, as links are sold."""
    if value is None:
        return "never"
    bits = 8 * value
    return f"{bits / 1e9:,.3g} Gbit/s" if bits < 1e12 else f"{bits / 1e12:,.3g} Tbit/s"


def rows(gradient: torch.Tensor, workers: int) -> list[list[str]]:
    """Make one row per method: time, bytes, break-even as measured and as calculated."""
    found = []
    for method, options in METHODS:
        cost = measure(method, options, gradient, workers)
        seconds = memory_nbytes(method, options, workers) * gradient.numel() / H200_BYTES_PER_S
        label = " ".join([method, *(f"{k}={v:g}" for k, v in options.items() if k != "freeze")])
        found.append(
            [
                label,
                f"{cost.seconds / gradient.numel() * 1e9:.3g}",
                f"{cost.ratio:.3g}",
                rate(cost.break_even),
                rate(Cost(seconds, cost.nbytes, cost.plain_nbytes).break_even),
            ]
        )
    return found


def main(argv: list[str] | None = None) -> int:
    """Measure and print; with --markdown, append the tables there too."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels.compression", description=__doc__
    )
    made.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    made.add_argument("--values", type=int, default=1 << 22, help="of the gradient")
    made.add_argument("--workers", type=int, nargs="+", default=[2, 8])
    made.add_argument("--markdown", type=Path, metavar="FILE", help="append the tables as Markdown")
    options = made.parse_args(argv)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    gradient = torch.randn(max(1, options.values // COLUMNS), COLUMNS, device=options.device)
    device = "CPU" if options.device == "cpu" else torch.cuda.get_device_name()
    machine = cpu_name() if options.device == "cpu" else device
    where = f"Machine: {machine}, one thread's CPU time, torch {torch.__version__}"
    text = [f"{where}; a gradient of {gradient.numel():,} fp32 values."]
    names = [
        "method", "ns per value", "times fewer bytes", f"pays below, {device} measured",
        "pays below, H200 calculated",
    ]  # fmt: skip
    for workers in options.workers:
        found = rows(gradient, workers)
        table = Table(title=f"{workers} workers, {gradient.numel():,} fp32 values")
        for name in names:
            table.add_column(name, justify="left" if name == "method" else "right")
        for row in found:
            table.add_row(*row)
        Console().print(table)
        lines = [names, ["---", *["---:"] * (len(names) - 1)], *found]
        text.append(f"### {workers} workers")
        text.append("\n".join("| " + " | ".join(line) + " |" for line in lines))
    if options.markdown:
        with options.markdown.open("a") as file:
            file.write("\n" + "\n\n".join(text) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
