"""``stoker kernels``: measure kernels on the cluster's GPUs, list the results, compile ahead of time.

``tune`` and ``warm`` submit a job, whose output they follow: measuring takes a GPU and time.
"""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Any

import click

from stoker.cli.options import cluster_options, http_client, job_client, pairs
from stoker.cli.output import echo, plural, print_json, print_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker.runtime.net.http import HttpClient
    from stoker_wire.messages.kernels import TunedKernel


@click.group()
def kernels() -> None:
    """Tune the training kernels to this cluster's GPUs, and compile them ahead of time."""


@kernels.command("list")
@click.option("--device", default="", help="Only of devices whose name starts so.")
@cluster_options
def list_tuned(device: str, address: str | None, token: str | None, as_json: bool) -> None:
    """List the measured configurations by device, kernel and shape."""
    tuned = _tuned(http_client(address, token), device)
    if as_json:
        print_json(tuned)
        return
    rows = [_row(one) for one in tuned]
    columns: dict[str, str | Callable[[dict[str, Any]], str]] = {name: name for name in _COLUMNS}
    print_table(rows, columns, empty="nothing was measured yet; see `stoker kernels tune --help`")


_COLUMNS = ("device", "kernel", "shape", "config", "median", "roofline", "faster by", "version")


def _row(one: TunedKernel) -> dict[str, Any]:
    gain = 1 - one.seconds / one.default_seconds if one.default_seconds else 0.0
    return {
        "device": one.device,
        "kernel": one.kernel,
        "shape": _plain(one.key),
        "config": _plain(one.config),
        "median": f"{one.seconds * 1e6:.1f} us",
        "roofline": f"{one.least_seconds / one.seconds:.0%}" if one.least_seconds else "",
        "faster by": f"{gain:.0%}",
        "version": one.version,
    }


def _plain(values: dict[str, Any]) -> str:
    return ",".join(f"{name}={value}" for name, value in values.items())


def _tuned(client: HttpClient, device: str) -> list[TunedKernel]:
    from stoker_wire.messages.control import Page
    from stoker_wire.messages.kernels import TUNING_NAMESPACE, TunedKernel

    query = {"device": device or None}
    tuned = list(client.items("/v1/kernels", Page[TunedKernel], query))
    asked = {**query, "limit": 1, "count": True}
    total = client.call("GET", "/v1/kernels", reply=Page[TunedKernel], query=asked).total or 0
    if total > len(tuned):
        strange = plural(total - len(tuned), "key")
        echo(f"{strange} of the namespace {TUNING_NAMESPACE} without a measurement", err=True)
    return tuned


@kernels.command(short_help="Measure an op's kernels and keep the fastest.")
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    default="bfloat16",
    show_default=True,
    help="Of the op's inputs.",
)
@click.option(
    "--num-gpus", type=click.IntRange(1), default=1, show_default=True, help="Whole GPUs to take."
)
@click.option(
    "--time-limit",
    type=click.FloatRange(1),
    default=300.0,
    show_default=True,
    help="Seconds to measure.",
)
@click.option("--accelerator-type", metavar="NAME", help="Which kind of GPU, as H200.")
@click.option("--interpreted", is_flag=True, help="Triton's interpreter on a CPU, for a try.")
@cluster_options
@click.argument("op")
@click.argument("sizes", nargs=-1, metavar="[SIZE=N]...")
def tune(
    dtype: str,
    num_gpus: int,
    time_limit: float,
    accelerator_type: str | None,
    interpreted: bool,
    address: str | None,
    token: str | None,
    as_json: bool,
    op: str,
    sizes: tuple[str, ...],
) -> None:
    """Measure an op's kernels and keep the fastest.

    As in: stoker kernels tune rms_norm columns=4096 rows=16384

    The measurements have the GPU for themselves. The results are used by every task whose
    runtime_env names kernels.
    """
    for name, size in pairs(sizes, "SIZE=N").items():
        if not size.isdecimal() or int(size) < 1:
            raise click.BadParameter(f"{name}={size}: a size is a whole number from 1")
    words = [op, *sizes, "--dtype", dtype, "--time-limit", f"{time_limit:g}"]
    words += ["--num-gpus", str(num_gpus)]
    if accelerator_type:
        words += ["--accelerator-type", accelerator_type]
    if interpreted:
        words.append("--interpreted")
    _run("stoker.train.autotuning", words, f"tune {op}", address, token, as_json)


@kernels.command(short_help="Compile kernels on every node that has GPUs.")
@click.option(
    "--timeout", type=click.FloatRange(1), default=900.0, show_default=True, help="Seconds to wait."
)
@cluster_options
@click.argument("specs", nargs=-1, required=True, metavar="SPEC...")
def warm(
    timeout: float, address: str | None, token: str | None, as_json: bool, specs: tuple[str, ...]
) -> None:
    """Compile kernels on every node that has GPUs, before a job needs them.

    A SPEC is an entry of runtime_env's "kernels": rms_norm, or
    '{"op": "rms_norm", "columns": 4096}'. A task that names the same list starts at once.
    """
    words = [*specs, "--timeout", f"{timeout:g}"]
    _run("stoker.train.warming", words, "warm kernels", address, token, as_json)


def _run(
    module: str, words: list[str], name: str, address: str | None, token: str | None, as_json: bool
) -> None:
    """Submit ``python -m module words``, follow it, and exit as it does."""
    from stoker.cli.job import exit_code, follow_job, tell_end

    client = job_client(address, token)
    if as_json:
        words = [*words, "--json"]
    job_id = client.submit_job(entrypoint=shlex.join(["python", "-m", module, *words]), name=name)
    ended = follow_job(client, job_id)
    if exit_code(ended):
        tell_end(ended)
    sys.exit(exit_code(ended))
