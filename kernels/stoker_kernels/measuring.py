"""The search for the fastest configuration of an op's kernels: each candidate is measured in this process.

``stoker.train.autotune`` runs :func:`measure_candidates` as a task that has the GPU for itself, and keeps
what comes of it; nothing here knows of a cluster. A candidate counts only if its outputs and gradients are
those of the launcher's own configuration, up to the order of summation.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from stoker_kernels import tuning
from stoker_kernels.workloads import workload

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator

    from stoker_kernels.tuning import Config, Question

SAMPLES_S = 0.25
"""The time that one candidate is measured for, after its warm-up."""
MIN_SAMPLES, MAX_SAMPLES = 5, 200
L2_NBYTES = 256 << 20
"""Written between samples, so that each finds its inputs in device memory (an H200's L2 has 50 MB)."""
ALLOWED_ERROR = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Largest RMS difference over RMS value: some 2-4 units in the last place of narrow types; in float32
what sums of 10^5 terms in another order may differ by."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One candidate of one choice. ``number`` counts from 1 to ``count``; 1 is the launcher's own.

    ``state`` is ``begun``, then one of ``measured`` (with the median and the 20 % and 80 % quantiles of one
    step in seconds), ``failed`` or ``late`` (the time was up), with the reason in ``note``.
    """

    kernel: str
    key: dict[str, int | str]
    config: dict[str, int]
    number: int
    count: int
    state: str
    seconds: float = 0.0
    low_seconds: float = 0.0
    high_seconds: float = 0.0
    note: str = ""
    identity: str = ""
    """The name of this candidate in ``skip``."""


def measure_candidates(
    op: str,
    dtype: str,
    sizes: dict[str, int],
    *,
    device: str = "cuda",
    time_limit_s: float = 300.0,
    skip: Container[str] = (),
) -> Iterator[Trial]:
    """Measure the candidates of every choice that one step of ``op`` makes, the launcher's own first.

    The step is the workload's forward and backward at ``sizes`` (those not named as in the workload).
    Each choice gets an equal share of ``time_limit_s``, which is looked at before each candidate.
    ``skip`` holds the ``identity`` of those that need no measurement. Raises ``ValueError`` if the op makes
    no choice at this size.
    """
    step = _step(op, getattr(torch, dtype), sizes, device)
    with tuning.listening() as choices:
        expected = step()
    questions = [question for question in choices.values() if len(_candidates(question)) > 1]
    if not questions:
        raise ValueError(f"{op} has nothing to choose at these sizes on {device}")
    for index, question in enumerate(questions, 1):
        left_s = time_limit_s / (len(questions) - index + 1)
        started_s = time.monotonic()
        yield from _of_question(question, step, expected, started_s + left_s, device, skip)
        time_limit_s -= time.monotonic() - started_s


def least_seconds(op: str, dtype: str, sizes: dict[str, int], *, device: str = "cuda") -> float:
    """Return the roofline of one step of ``op``: the time that its bytes or its operations take at least.

    The rates are those of a large copy and of a large product of matrices of ``dtype``, measured here.
    """
    kind, chosen = getattr(torch, dtype), workload(op)
    cost = chosen.cost(kind, **chosen.sized(**sizes))
    nbytes, rows = (1 << 30, 8192) if device != "cpu" else (1 << 24, 128)
    source = torch.ones(nbytes, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    copy_s, *_ = _measured(lambda: target.copy_(source), device)
    matrix = torch.randn(rows, rows, dtype=kind, device=device)
    product_s, *_ = _measured(lambda: matrix @ matrix, device)
    return max(
        (cost.forward_nbytes + cost.backward_nbytes) * copy_s / (2 * nbytes),
        (cost.forward_flops + cost.backward_flops) * product_s / (2 * rows**3),
    )


def _candidates(question: Question) -> list[Config]:
    others = [dict(config) for config in question.candidates if config != question.default]
    return [dict(question.default), *others]


def _of_question(
    question: Question,
    step: Callable[[], list[torch.Tensor]],
    expected: list[torch.Tensor],
    deadline_s: float,
    device: str,
    skip: Container[str],
) -> Iterator[Trial]:
    candidates = _candidates(question)
    for number, config in enumerate(candidates, 1):
        identity = repr((question.kernel, question.key, sorted(config.items())))
        if identity in skip:
            continue

        key = dict(question.key)
        begun = Trial(
            question.kernel, key, config, number, len(candidates), "begun", identity=identity
        )
        if number > 1 and time.monotonic() > deadline_s:
            yield replace(begun, state="late", note="the time was up before its turn")
            continue
        yield begun
        try:
            with tuning.forcing(question, config):
                wrong = difference(expected, step())
                middle, low, high = (0.0, 0.0, 0.0) if wrong else _measured(step, device)
        except Exception as error:
            _check_device(device)
            if number == 1:
                raise
            yield replace(begun, state="failed", note=f"{type(error).__name__}: {error}"[:300])
            continue
        if wrong:
            yield replace(begun, state="failed", note=wrong)
            continue
        yield replace(begun, state="measured", seconds=middle, low_seconds=low, high_seconds=high)


def _check_device(device: str) -> None:
    """Raise if an error has left the device unusable: nothing measured after it would mean anything."""
    if device != "cpu":
        torch.cuda.synchronize()


def _step(
    op: str, dtype: torch.dtype, sizes: dict[str, int], device: str
) -> Callable[[], list[torch.Tensor]]:
    """Return one forward and backward pass on fixed inputs; it returns outputs and gradients."""
    chosen = workload(op)
    torch.manual_seed(0)
    inputs = chosen.inputs(device, dtype, **chosen.sized(**sizes))
    leaves = [
        value
        for value in inputs.values()
        if isinstance(value, torch.Tensor) and value.requires_grad
    ]

    def step() -> list[torch.Tensor]:
        torch.manual_seed(1)  # what draws numbers draws the same ones
        outputs = chosen.run(**inputs)
        results = list(outputs) if isinstance(outputs, tuple) else [outputs]
        wanted = [one for one in results if one.requires_grad] if chosen.differentiable else []
        gradients = (
            torch.autograd.grad(
                wanted, leaves, [torch.ones_like(one) for one in wanted], allow_unused=True
            )
            if wanted and leaves
            else ()
        )
        return [one.detach() for one in (*results, *gradients) if one is not None]

    return step


def difference(expected: list[torch.Tensor], found: list[torch.Tensor]) -> str:
    """Say how ``found`` differs from ``expected`` beyond the order of summation; empty if it does not."""
    for index, (want, got) in enumerate(zip(expected, found, strict=True)):
        if want.shape != got.shape or want.dtype != got.dtype:
            return f"tensor {index} is {got.dtype} {tuple(got.shape)}, not {tuple(want.shape)}"
        if not want.is_floating_point():
            if not torch.equal(want, got):
                return f"tensor {index} has other values"
            continue
        finite = want.isfinite()
        if not torch.equal(finite, got.isfinite()):
            return f"tensor {index} is not finite where it should be"
        if not torch.equal(want[~finite].nan_to_num(), got[~finite].nan_to_num()):
            return f"tensor {index} has other infinities"
        reference = want[finite].double()
        if not reference.numel():
            continue
        scale = float(reference.square().mean().sqrt())
        error = float((got[finite].double() - reference).square().mean().sqrt())
        allowed = ALLOWED_ERROR.get(want.dtype, 1e-4)
        if error > allowed * scale:
            return f"tensor {index} differs by {error:.1e} RMS from values of {scale:.1e}"
    return ""


def _measured(step: Callable[[], Any], device: str) -> tuple[float, float, float]:
    """Return the median, 20 % and 80 % quantile of a step's seconds."""
    sample = _host_sampler(step) if device == "cpu" else _device_sampler(step)
    first = [sample() for _ in range(3)][1:]
    count = int(SAMPLES_S / max(median(first), 1e-9))
    times = sorted(sample() for _ in range(min(max(count, MIN_SAMPLES), MAX_SAMPLES)))
    return median(times), times[len(times) // 5], times[len(times) * 4 // 5]


def _host_sampler(step: Callable[[], Any]) -> Callable[[], float]:
    def sample() -> float:
        started_s = time.perf_counter()
        step()
        return time.perf_counter() - started_s

    return sample


def _device_sampler(step: Callable[[], Any]) -> Callable[[], float]:
    flushed = torch.empty(L2_NBYTES, dtype=torch.int8, device="cuda")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def sample() -> float:
        flushed.zero_()
        begin.record()
        step()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    return sample
