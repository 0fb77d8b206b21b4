"""``python -m stoker_kernels.aot``: compile named kernels into Triton's cache, one line of JSON each.

The nodelet runs it before a task that names its kernels; people run it while they build an image.
Exit codes: 0, 1 (a kernel or a function failed; its traceback is on stderr), 2 (the request makes no sense
here). It loads without torch and Triton: it says which is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import sysconfig
import threading
import traceback
from contextlib import contextmanager, redirect_stdout, suppress
from importlib.util import find_spec
from pathlib import Path
from site import getsitepackages
from typing import TYPE_CHECKING, Any, TextIO

from stoker_kernels.aot.compiling import compiling
from stoker_kernels.aot.specs import Spec, SpecError, make_spec, step_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_PACKAGE = Path(__file__).resolve().parents[1]
_USAGE_CODE = 2


def compile_specs(
    specs: Sequence[Spec], arch: int, report: Callable[[dict[str, Any]], None]
) -> None:
    """Run every spec dry for ``arch``; ``report`` gets one record per kernel, as it is compiled.

    A record's ``entry`` is the kernel's folder in Triton's cache, ``cached`` whether it was there.
    """
    import torch
    from triton import knobs

    steps = [(spec, step_of(spec)) for spec in specs]
    spec = specs[0]

    def on_compiled(
        *, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool
    ) -> None:
        report(
            {
                "spec": spec.where,
                "name": spec.op or spec.call,
                "kernel": metadata["name"],
                "arch": arch,
                "cached": cache_hit,
                "seconds": round(times.total / 1e6, 3),
                "num_warps": metadata["num_warps"],
                "shared_nbytes": metadata["shared"],
                "entry": Path(next(iter(metadata_group.values()))).parent.name,
            }
        )

    before, knobs.compilation.listener = knobs.compilation.listener, on_compiled
    try:
        with compiling(arch):
            for spec, step in steps:
                try:
                    with torch.device("meta"):
                        step()
                except (Exception, SystemExit) as error:
                    what = f"{spec.where}: {spec.op or spec.call} for sm_{arch}"
                    raise RuntimeError(f"{what}: {type(error).__name__}: {error}") from error
    finally:
        knobs.compilation.listener = before


def local_arch() -> int:
    """Return the compute capability of this machine's first GPU. Raises SpecError without one."""
    try:
        import pynvml

        pynvml.nvmlInit()
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(
            pynvml.nvmlDeviceGetHandleByIndex(0)
        )
    except Exception as error:
        raise SpecError(f"no GPU to compile for ({error}): give --arch, as --arch 90") from None
    return int(major) * 10 + int(minor)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options = _options(arguments)
    try:
        entries = _entries(options)
        specs = [make_spec(entry, f"kernels[{index}]") for index, entry in enumerate(entries)]
        arch = options.arch or local_arch()
        for package, remedy in (("torch", "'stoker[train]'"), ("triton", "triton")):
            if find_spec(package) is None:
                raise SpecError(
                    f"kernels: {package} is not installed on this node: pip install {remedy}"
                )
        with _records() as output:
            compile_specs(specs, arch, lambda record: _print(output, record))
            if options.stdin and any(spec.call for spec in specs):
                _print(output, {"sources": _sources()})
    except SpecError as error:
        sys.stderr.write(f"error: {error}\n")
        return _USAGE_CODE
    except Exception as error:
        traceback.print_exception(error)
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


@contextmanager
def _records() -> Iterator[TextIO]:
    """Yield standard output, for records alone.

    Anything else that is written to it, by a user's function or by a process that this starts, goes to
    standard error.
    """
    sys.stdout.flush()
    saved_fd = os.dup(1)
    os.dup2(2, 1)
    try:
        with open(saved_fd, "w", closefd=False) as file, redirect_stdout(sys.stderr):
            yield file
    finally:
        os.dup2(saved_fd, 1)
        os.close(saved_fd)


def _sources() -> dict[str, int]:
    """Return the files of the user's modules that are loaded, and when each was last changed (ns)."""
    folders = map(Path, (*sysconfig.get_paths().values(), *getsitepackages()))
    # Also as they are named: files there may be links to elsewhere (Debian's sitecustomize.py).
    installed = {_PACKAGE, *(one for path in folders for one in (path, path.resolve()))}
    files = {}
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None)
        if not isinstance(name, str):
            continue
        path = Path(name)
        if installed.isdisjoint((*path.parents, *path.resolve().parents)):
            with suppress(OSError):
                files[name] = os.stat(name).st_mtime_ns
    return files


def _print(file: TextIO, record: dict[str, Any]) -> None:
    file.write(json.dumps(record) + "\n")
    file.flush()


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m stoker_kernels.aot",
        description="Compile kernels into Triton's cache (TRITON_CACHE_DIR) without running them.",
        epilog="""A SPEC is an op (rms_norm), a JSON object such as
        '{"op": "rms_norm", "dtype": "bfloat16", "columns": 4096}', or module:function, which is called
        without arguments while new tensors are on the meta device.""",
    )
    parser.add_argument("specs", nargs="*", metavar="SPEC", help="what to compile; none: every op")
    parser.add_argument(
        "--arch", type=_arch, default=0, help="compute capability, as 90 [default: this GPU's]"
    )
    parser.add_argument(
        "--stdin",
        action="store_true",
        help="read the specs as one line of JSON, and end when standard input does",
    )
    return parser.parse_args(arguments)


def _arch(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{1,2}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a compute capability such as 90")
    return int(text)


def _entries(options: argparse.Namespace) -> list[Any]:
    if options.stdin:
        entries = json.loads(_first_line_of_lifeline())
    elif options.specs:
        entries = [_from_argument(text) for text in options.specs]
    else:
        from stoker_kernels.workloads import workloads

        entries = [name for name, work in workloads().items() if work.launches]
    if not isinstance(entries, list) or not entries:
        raise SpecError("kernels: expected a list of at least one spec")
    return entries


def _from_argument(text: str) -> Any:
    if not text.startswith("{"):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise SpecError(f"{text!r} is no JSON object ({error})") from None


def _first_line_of_lifeline() -> bytes:
    """Return the first line of standard input; when that ends, so does this process group."""
    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(0, 1 << 16)
        if not chunk:
            break
        line += chunk

    def watch() -> None:
        while os.read(0, 1 << 16):
            pass
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="lifeline").start()
    return line
