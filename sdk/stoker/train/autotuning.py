"""``stoker.train.autotune``: measure an op's kernels on the cluster, and keep the fastest configuration.

Measurements run as a task that has its GPU for itself. What comes of them is in the control store by
kernel, shape and device; a nodelet hands it to each worker whose ``runtime_env`` names kernels. The
command ``stoker kernels tune`` submits ``python -m stoker.train.autotuning``.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from stoker import kv
from stoker.api.calls import get
from stoker.api.remote import remote
from stoker.exceptions import BadRequestError, StokerError
from stoker.runtime.options.kernel_specs import DTYPES
from stoker_wire.messages.kernels import CPU_DEVICE, TUNING_NAMESPACE, TunedKernel, tuning_key
from stoker_wire.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ("autotune",)

MIN_GAIN = 0.02
"""A candidate that is faster by less than this is noise: the launcher's own choice is kept."""
MAX_RESTARTS = 5
"""Of the task, after candidates that took the process or the GPU down with them."""
START_S = 600.0
"""The time that a task may wait for its GPU."""
SLACK_S = 180.0
"""The time that a task may run beyond the time limit: imports, the step's inputs, its last candidate. After
that its candidate hangs, and its process is ended."""

Trial = dict[str, Any]
"""An item that a task yields: the fields of ``stoker_kernels.measuring.Trial``."""


@dataclass(slots=True)
class _Choice:
    """The measurements of one (kernel, key)."""

    kernel: str
    key: dict[str, int | str]
    count: int
    trials: list[Trial] = field(default_factory=list)

    def best(self) -> Trial | None:
        """Return the fastest, or the launcher's own where nothing is clearly faster; None without any."""
        measured = [trial for trial in self.trials if trial["state"] == "measured"]
        if not measured:
            return None
        best = min(measured, key=lambda trial: (trial["seconds"], trial["number"]))
        default = next((trial for trial in measured if trial["number"] == 1), None)
        if default is not None and best["seconds"] > default["seconds"] * (1 - MIN_GAIN):
            return default
        return best


def autotune(
    op: str,
    *,
    dtype: Any = "bfloat16",
    num_gpus: float = 1,
    time_limit: float = 300.0,
    interpreted: bool = False,
    progress: Callable[[Trial], None] | None = None,
    options: Mapping[str, Any] | None = None,
    **sizes: int,
) -> list[TunedKernel]:
    """Measure every candidate for the kernels of ``op`` at ``sizes``; keep and return the best ones.

    ``op`` and ``sizes`` are a workload of ``stoker.kernels`` and the sizes that differ from its own. The
    measurements take about ``time_limit`` seconds at most, the launcher's own configurations first, and
    have ``num_gpus`` whole GPUs for themselves. ``options`` are further options of the task, such as
    ``accelerator_type`` or ``scheduling_strategy``, which choose the device. ``progress`` is called with
    each trial (a mapping with ``kernel``, ``number`` of ``count``, ``state``, ``seconds``, ``note``) when
    it begins and ends. ``interpreted`` runs Triton's interpreter on a CPU, for tests.

    Raises ``BadRequestError`` for an argument that makes no sense, and the task's error if not even the
    launcher's own configuration runs.
    """
    name = _checked_dtype(op, dtype, num_gpus, time_limit, interpreted, sizes)
    task = _task(num_gpus, interpreted, options or {})
    choices: dict[str, _Choice] = {}
    facts: dict[str, Any] = {}
    end_s = time.monotonic() + time_limit
    for restarts in range(MAX_RESTARTS + 1):
        measured = _measured_identities(choices)
        left_s = max(0.0, end_s - time.monotonic())
        running: Trial | None = None
        bounded = task.options(timeout=left_s + SLACK_S, start_deadline=START_S)
        try:
            for ref in bounded.remote(op, name, sizes, left_s, measured, interpreted):
                report = get(ref)
                if "device" in report:
                    facts = _same_device(facts, report)
                    continue
                running = report if report["state"] == "begun" else None
                _add_trial(choices, report, progress)
            break
        except StokerError as error:
            # The candidate that took the process down is out; the others get another process.
            if running is None or running["number"] == 1 or restarts == MAX_RESTARTS:
                raise
            note = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
            _add_trial(choices, {**running, "state": "failed", "note": note}, progress)
    return [
        _store_best(choice, op, name, sizes, facts) for choice in choices.values() if choice.best()
    ]


def _checked_dtype(
    op: str,
    dtype: Any,
    num_gpus: float,
    time_limit: float,
    interpreted: bool,
    sizes: Mapping[str, Any],
) -> str:
    """Return the dtype's name; raise BadRequestError for every mistake that can be seen here."""
    name = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
    if not isinstance(op, str):
        raise BadRequestError(f"op={op!r}: give the name of an op, as 'rms_norm'", field="op")
    if name not in DTYPES:
        raise BadRequestError(f"dtype={dtype!r}: use one of {', '.join(DTYPES)}", field="dtype")
    if not interpreted and (num_gpus < 1 or num_gpus != int(num_gpus)):
        raise BadRequestError(
            f"num_gpus={num_gpus} cannot be measured\n"
            "others on the same GPU would be measured too: give whole ones",
            field="num_gpus",
        )
    if not time_limit > 0:
        raise BadRequestError(f"time_limit={time_limit}: give seconds above 0", field="time_limit")
    for size, amount in sizes.items():
        if isinstance(amount, bool) or not isinstance(amount, int) or amount < 1:
            raise BadRequestError(f"{size}={amount!r}: a size is a whole number from 1", field=size)
    return name


def _task(num_gpus: float, interpreted: bool, options: Mapping[str, Any]) -> Any:
    variables = {"TRITON_INTERPRET": "1", "STOKER_KERNELS_BACKEND": "triton"} if interpreted else {}
    arguments = dict(options)
    env = dict(arguments.pop("runtime_env", None) or {})
    env["env_vars"] = {**env.get("env_vars", {}), **variables}
    fixed = {"num_gpus": 0 if interpreted else num_gpus, "max_retries": 0, "max_calls": 1}
    return remote(name="autotune", **{**arguments, **fixed, "runtime_env": env})(_measure)


def _measure(
    op: str,
    dtype: str,
    sizes: dict[str, int],
    time_limit_s: float,
    skip: tuple[str, ...],
    interpreted: bool,
) -> Iterator[Trial]:
    """Run as the task: yield the device that it runs on, then its trials as they come."""
    from importlib.metadata import version

    import torch

    from stoker import kernels

    if not interpreted and not torch.cuda.is_available():
        raise RuntimeError(
            "this task sees no GPU: measure where there is one (or interpreted=True)"
        )
    device = "cpu" if interpreted else "cuda"
    yield {
        "device": CPU_DEVICE if interpreted else torch.cuda.get_device_name(),
        "torch": str(torch.__version__),
        "triton": version("triton"),
        "least_seconds": 0.0 if interpreted else kernels.least_seconds(op, dtype, sizes),
    }
    trials = kernels.measure_candidates(
        op, dtype, sizes, device=device, time_limit_s=time_limit_s, skip=skip
    )
    for trial in trials:
        yield asdict(trial)


def _same_device(before: Mapping[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    """Return ``report``; measurements of one kind of device must not be compared with another's."""
    if before and before["device"] != report["device"]:
        raise BadRequestError(
            f"measuring went on on {report['device']} after a candidate had ended it on "
            f"{before['device']}: name one with options={{'accelerator_type': ...}}",
            field="options",
        )
    return report


def _add_trial(
    choices: dict[str, _Choice], trial: Trial, progress: Callable[[Trial], None] | None
) -> None:
    where = tuning_key("", trial["kernel"], trial["key"])
    choice = choices.get(where)
    if choice is None:
        choice = choices[where] = _Choice(trial["kernel"], trial["key"], trial["count"])
    if trial["state"] != "begun":
        choice.trials.append(trial)
    if progress is not None:
        progress(trial)


def _measured_identities(choices: Mapping[str, _Choice]) -> tuple[str, ...]:
    return tuple(
        trial["identity"]
        for choice in choices.values()
        for trial in choice.trials
        if trial["state"] != "late"
    )


def _store_best(
    choice: _Choice, op: str, dtype: str, sizes: dict[str, int], facts: Mapping[str, Any]
) -> TunedKernel:
    """Store the outcome of a choice for its device; the store is what every later job reads."""
    best = choice.best()
    assert best is not None
    default_s = next((t["seconds"] for t in choice.trials if t["number"] == 1), 0.0)
    record = TunedKernel(
        kernel=choice.kernel,
        key=choice.key,
        config=best["config"],
        device=facts["device"],
        op=op,
        dtype=dtype,
        sizes=sizes,
        seconds=best["seconds"],
        low_seconds=best["low_seconds"],
        high_seconds=best["high_seconds"],
        default_seconds=default_s,
        least_seconds=facts["least_seconds"],
        candidates=choice.count,
        measured=sum(trial["state"] == "measured" for trial in choice.trials),
        version=VERSION,
        torch=facts["torch"],
        triton=facts["triton"],
        at_s=time.time(),
    )
    key = tuning_key(record.device, record.kernel, record.key)
    kv.put(key, msgspec.json.encode(record), namespace=TUNING_NAMESPACE)
    return record


def main() -> int:
    """Run the command line; return its exit code."""
    from stoker.api.init import init

    parser = argparse.ArgumentParser(prog="python -m stoker.train.autotuning")
    parser.add_argument("op")
    parser.add_argument("sizes", nargs="*", metavar="SIZE=N")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--num-gpus", type=int, default=1)
    parser.add_argument("--time-limit", type=float, default=300.0)
    parser.add_argument("--accelerator-type")
    parser.add_argument("--interpreted", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sizes = {name: int(size) for name, _, size in (text.partition("=") for text in arguments.sizes)}
    options = (
        {"accelerator_type": arguments.accelerator_type} if arguments.accelerator_type else None
    )
    init()
    records = autotune(
        arguments.op,
        dtype=arguments.dtype,
        num_gpus=arguments.num_gpus,
        time_limit=arguments.time_limit,
        interpreted=arguments.interpreted,
        progress=None if arguments.json else _print_trial,
        options=options,
        **sizes,
    )
    if arguments.json:
        sys.stdout.write(msgspec.json.encode(records).decode() + "\n")
    for record in records if not arguments.json else ():
        gain = 1 - record.seconds / record.default_seconds if record.default_seconds else 0.0
        sys.stdout.write(
            f"{record.kernel} on {record.device}: {record.config}, "
            f"{record.seconds * 1e6:.1f} us a step, faster by {gain:.0%}; kept\n"
        )
    return 0


def _print_trial(trial: Trial) -> None:
    if trial["state"] != "begun":
        result = f"{trial['seconds'] * 1e6:.1f} us" if trial["state"] == "measured" else ""
        note = f"{trial['state']}: {trial['note']}" if trial["note"] else ""
        where = f"{trial['kernel']} {trial['number']}/{trial['count']}"
        sys.stdout.write(f"{where}  {trial['config']}  {result or note}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
