"""``python -m benchmarks.kernels``: our kernels, eager PyTorch, torch.compile and torch's own fused ops.

Each op runs at its workload's size and variants, in bf16 and fp32, forward, backward and both; the table
says how much of the roofline (measured copy bandwidth, measured matrix rate) each provider reaches.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.kernels.cases import Result, run_case
from benchmarks.kernels.peers import providers
from benchmarks.kernels.plots import plot
from benchmarks.kernels.timing import ceilings, device_name
from benchmarks.results import commit
from benchmarks.results import device as cpu_name
from stoker_kernels.workloads import Workload, workloads


class DataSheet(NamedTuple):
    """What a device's maker says of it."""

    name: str
    nbytes_per_s: float
    flops_per_s: float


H200 = DataSheet("NVIDIA H200 (4.8 TB/s, 989 TFLOP/s)", 4.8e12, 989e12)
HERE = Path(__file__).resolve().parent
COLUMNS = (
    "at", "commit", "device", "torch", "triton", "op", "sizes", "dtype", "mode", "provider",
    "median_ms", "low_ms", "high_ms", "gbytes_per_s", "tflops_per_s", "roofline", "peak_mbytes",
)  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    made.add_argument(
        "ops", nargs="*", metavar="OP", help=f"which of: {', '.join(workloads())} (all)"
    )
    made.add_argument("--device", choices=("cuda", "cpu"), default=device_name())
    made.add_argument(
        "--dtype", action="append", choices=("bfloat16", "float32"), help="one or both"
    )
    made.add_argument(
        "--floors",
        action="store_true",
        help="print the least times an H200's data sheet allows, and end",
    )
    made.add_argument(
        "--size",
        action="append",
        default=[],
        type=parse_size,
        metavar="NAME=N",
        help="instead of the ops' own",
    )
    made.add_argument(
        "--small", action="store_true", help="tests' sizes: proves that it runs, no speed"
    )
    made.add_argument("--no-variants", action="store_true", help="the main size of each op only")
    made.add_argument(
        "--csv", type=Path, default=HERE / "results.csv", help="results are appended here"
    )
    made.add_argument("--plots", type=Path, metavar="FOLDER", help="write one picture per op here")
    return made


def main(argv: list[str] | None = None) -> int:
    """Measure, print, append to the CSV; 1 when a provider of ours failed."""
    options = parser().parse_args(argv)
    unknown = set(options.ops) - workloads().keys()
    if unknown:
        parser().error(f"no op {sorted(unknown)[0]!r}: there are {', '.join(workloads())}")
    console = Console()
    if options.floors:
        console.print(floors(options.ops or list(workloads())))
        return 0
    limits = ceilings(options.device)
    console.print(
        f"{describe(options.device)}: copy {limits.copy_nbytes_per_s / 1e12:.3g} TB/s, "
        f"bf16 product {limits.matmul_flops_per_s / 1e12:.3g} TFLOP/s"
    )
    failures, results = [], []
    for name in options.ops or workloads():
        work, found = workloads()[name], []
        for dtype in work.dtypes:
            if options.dtype and str(dtype).removeprefix("torch.") not in options.dtype:
                continue
            for variant in _sizes(work, options):
                for provider, function in providers(work, options.device).items():
                    try:
                        found += run_case(
                            work, provider, function, options.device, dtype, limits, **variant
                        )
                    except (RuntimeError, ValueError, TypeError) as error:
                        console.print(f"[red]{name} {provider}[/]: {_first_line(error)}")
                        failures += [name] if provider == "stoker" else []
                    finally:
                        torch._dynamo.reset()
                        if options.device == "cuda":
                            torch.cuda.empty_cache()
        console.print(*tables(found), sep="\n")
        results += found
        append(options.csv, options.device, found)  # a run that is cut off keeps what it has
    if options.plots:
        plot(results, options.plots, describe(options.device))
    return 1 if failures else 0


def parse_size(text: str) -> tuple[str, int]:
    """Parse ``seq_len=16384`` as a pair."""
    name, _, number = text.partition("=")
    if not name or not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=N, for example rows=4096")
    return name, int(number)


def _sizes(work: Workload, options: argparse.Namespace) -> list[Mapping[str, int]]:
    """Return the sizes to measure ``work`` at."""
    if options.small:
        return [work.small]
    if options.size:
        return [dict(options.size)]
    return [{}] if options.no_variants else [{}, *work.variants]


def floors(names: list[str]) -> Table:
    """Calculate, not measure: bytes over bandwidth or operations over the matrix rate, the larger."""
    made = Table(
        "op", "sizes", "bound by", title=f"least ms on {H200.name}, bf16", title_justify="left"
    )
    for title in ("forward", "backward"):
        made.add_column(title, justify="right")
    for name in names:
        work = workloads()[name]
        cost = work.cost(work.dtypes[0], **work.shape)
        least = []
        for nbytes, flops in (
            (cost.forward_nbytes, cost.forward_flops), (cost.backward_nbytes, cost.backward_flops)
        ):  # fmt: skip
            least.append(max(nbytes / H200.nbytes_per_s, flops / H200.flops_per_s) * 1e3)
        bound = (
            "arithmetic" if cost.forward_flops / H200.flops_per_s * 1e3 == least[0] else "memory"
        )
        sizes = " ".join(f"{k}={v}" for k, v in work.shape.items())
        made.add_row(name, sizes, bound, *(f"{ms:.3f}" if ms else "-" for ms in least))
    return made


def tables(results: list[Result]) -> Iterator[Table]:
    """Make a table for each size and dtype of one op; in bold the fastest provider of each mode."""
    for sizes, dtype in dict.fromkeys((r.sizes, r.dtype) for r in results):
        of_case = [r for r in results if (r.sizes, r.dtype) == (sizes, dtype)]
        best: dict[str, float] = {}
        for r in of_case:
            best[r.mode] = min(best.get(r.mode, math.inf), r.timing.median_ms)
        made = Table(
            "mode", "provider", title=f"{of_case[0].op} {dtype} {sizes}", title_justify="left"
        )
        for title in ("ms", "20-80 %", "GB/s", "TFLOP/s", "roofline", "peak MB"):
            made.add_column(title, justify="right")
        for r in of_case:
            timing = r.timing
            made.add_row(
                r.mode, r.provider,
                f"{timing.median_ms:.4g}", f"{timing.low_ms:.4g}-{timing.high_ms:.4g}",
                f"{r.gbytes_per_s:.4g}", f"{r.tflops_per_s:.4g}", f"{r.roofline:.1%}",
                f"{timing.peak_nbytes / 1e6:.4g}",
                style="bold" if timing.median_ms == best[r.mode] else None,
            )  # fmt: skip
        yield made


def append(path: Path, device: str, results: list[Result]) -> None:
    """Add results to the CSV, with what decides them."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    known = path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if not known:
            writer.writerow(COLUMNS)
        for r in results:
            numbers = (
                *r.timing[:3], r.gbytes_per_s, r.tflops_per_s, r.roofline, r.timing.peak_nbytes / 1e6
            )  # fmt: skip
            writer.writerow(
                (
                    now, commit(), describe(device), torch.__version__, triton_version(), r.op, r.sizes,
                    r.dtype, r.mode, r.provider, *(f"{number:.5g}" for number in numbers),
                )
            )  # fmt: skip


def describe(device: str) -> str:
    """Return the device's own name."""
    return torch.cuda.get_device_name() if device == "cuda" else cpu_name()


def triton_version() -> str:
    """Return Triton's version, or none."""
    try:
        import triton
    except ImportError:
        return "none"
    return str(triton.__version__)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"


if __name__ == "__main__":
    sys.exit(main())
