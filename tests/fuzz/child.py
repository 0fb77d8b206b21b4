"""Fuzzing of decoders in a process of its own, under limits of memory and of CPU time.

Run by :mod:`tests.fuzz.decoding`. An input that ends the process itself is known by its number, which is in
a file before it is decoded. Deadlines count CPU time: a loaded machine makes no finding.
"""

from __future__ import annotations

import gc
import json
import logging
import mmap
import resource
import signal
import struct
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from tests.fuzz.decoders import DECODERS
from tests.fuzz.mutations import input_of

if TYPE_CHECKING:
    from types import FrameType

    from tests.fuzz.decoders import Decoder

ROOM_BYTES = 256 << 20
"""Address space that a decoder may take beyond what the process has once all is imported."""
INPUT_CPU_S = 5.0
CPU_S_PER_INPUT = 0.05
MAX_KINDS = 20
"""Findings of different kinds after which a run ends."""
_SHOWN_BYTES = 200
NUMBER = struct.Struct("<Q")


class InputDeadline(BaseException):
    """The deadline of one input; no ``except Exception`` of a decoder takes it."""


def limit(inputs: int) -> None:
    """Bound this process from here on."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * mmap.PAGESIZE + ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    # For code that never comes back to the interpreter.
    spent = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    cpu_s = int(spent + 60 + CPU_S_PER_INPUT * inputs)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def fault_of(decoder: Decoder, data: bytes) -> BaseException | None:
    """Decode one input; return what came out that is not a documented error."""
    signal.setitimer(signal.ITIMER_PROF, INPUT_CPU_S)
    try:
        decoder.decode(data)
    except decoder.errors as error:
        # Whoever turns all exceptions into the documented one has been out of memory all the same.
        if isinstance(error.__context__, MemoryError):
            return error.__context__
    except BaseException as error:
        return error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return None


def describe(error: BaseException) -> tuple[str, str]:
    """Return what makes a finding one of its kind, and its text."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    where = f"{Path(last.filename).name}:{last.lineno}" if last else "?"
    kind = f"{type(error).__name__} at {where}"
    way = " > ".join(f"{Path(f.filename).name}:{f.lineno}" for f in frames[1:][:6])
    return kind, f"{type(error).__name__}: {str(error)[:300]} ({way})"


def on_deadline(_: int, __: FrameType | None) -> None:
    """End an input that takes too long."""
    raise InputDeadline(f"it took more than {INPUT_CPU_S:g} s of CPU time")


def fuzz(name: str, seed: str, numbers: range, at: mmap.mmap) -> dict[str, object]:
    """Give a decoder its inputs; return the outcome."""
    decoder = DECODERS[name]
    samples = decoder.samples()
    findings: dict[str, dict[str, object]] = {}
    began_s = time.monotonic()
    done = 0
    for number in numbers:
        NUMBER.pack_into(at, 0, number)
        data = input_of(f"{seed} {name}", number, samples)
        error = fault_of(decoder, data)
        done += 1
        if error is None:
            continue
        kind, text = describe(error)
        del error
        finding = findings.setdefault(
            kind, {"number": number, "text": text, "input": data[:_SHOWN_BYTES].hex(), "times": 0}
        )
        finding["times"] = int(str(finding["times"])) + 1
        if len(findings) >= MAX_KINDS:
            break
    seconds = time.monotonic() - began_s
    return {"inputs": done, "seconds": seconds, "findings": list(findings.values())}


def main() -> int:
    """Fuzz some decoders, one after the other; each line of output is the outcome of one, as JSON."""
    names, seed, first, count, progress = sys.argv[1:]
    numbers = range(int(first), int(first) + int(count))
    logging.disable()
    gc.freeze()
    signal.signal(signal.SIGPROF, on_deadline)
    limit(len(numbers) * len(names.split(",")))
    with Path(progress).open("r+b") as file, mmap.mmap(file.fileno(), NUMBER.size) as at:
        for name in names.split(","):
            sys.stdout.write(json.dumps(fuzz(name, seed, numbers, at)) + "\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
