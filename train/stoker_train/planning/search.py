"""The search: every strategy that the numbers allow, refused by a named constraint or ranked by its time."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from stoker_train.planning.costs import Estimator
from stoker_train.planning.plans import Plan, Plans, Refusal
from stoker_train.planning.profiles.profile import Profile
from stoker_train.planning.strategy import Recompute, Strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stoker_train.planning.cluster_shape import ClusterShape
    from stoker_train.planning.memory import Memory
    from stoker_train.planning.model_shape import ModelShape
    from stoker_train.planning.precision import Precision

_MAX_MICRO_BATCH = 64
_INTERLEAVES = (1, 2, 4)
_GB = 1e9


class _Refusals:
    """Counts of how often each constraint bound, with the nearest case."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, float, str]] = {}

    def add(self, constraint: str, excess: float, text: Callable[[], str]) -> None:
        count, least, nearest = self._found.get(constraint, (0, float("inf"), ""))
        if excess < least:
            least, nearest = excess, text()
        self._found[constraint] = count + 1, least, nearest

    def all(self) -> tuple[Refusal, ...]:
        return tuple(Refusal(name, count, text) for name, (count, _, text) in self._found.items())


def search(
    model: ModelShape,
    cluster: ClusterShape,
    *,
    batch: int,
    seq_len: int,
    gpus: int,
    precision: Precision,
    profile: float | Profile | None,
    limit: int,
) -> Plans:
    """Return the ``limit`` fastest strategies for ``gpus`` GPUs; see :func:`~.entry.plan_training`."""
    estimator = make_estimator(model, cluster, precision, seq_len, profile)
    refusals, found, considered = _Refusals(), [], 0
    for tensor, pipeline in _degrees(model, cluster, gpus, refusals):
        data = gpus // (tensor * pipeline)
        for shape in _shapes(model, batch, data, tensor, pipeline, refusals):
            plan, tried = _first_that_fits(estimator, cluster, shape, refusals)
            considered += tried
            if plan is not None:
                found.append(plan)
    # Of equally fast plans, the one that leaves most memory.
    found.sort(key=lambda plan: (round(plan.time.total_s, 9), plan.memory.total))
    return Plans(tuple(found[:limit]), refusals.all(), considered)


def make_estimator(
    model: ModelShape,
    cluster: ClusterShape,
    precision: Precision,
    seq_len: int,
    profile: float | Profile | None,
) -> Estimator:
    """Return what estimates one strategy after the other; ValueError for a profile that is no time."""
    rate = cluster.flops_per_s * precision.rate
    passes, seconds = None, profile
    if isinstance(profile, Profile):
        passes, seconds = profile, _seconds_of_a_sequence(model, profile)
    if isinstance(seconds, float | int):
        if not seconds > 0:
            raise ValueError(f"plan_training(): profile must be seconds above 0, got {seconds}")
        rate = 3.0 * seq_len * model.flops_per_token(seq_len) / seconds
    return Estimator(model, cluster, precision, seq_len, rate, passes)


def _seconds_of_a_sequence(model: ModelShape, profile: Profile) -> float:
    layer = profile.layer_forward.seconds(1) + profile.layer_backward.seconds(1)
    ends = profile.ends_forward.seconds(1) + profile.ends_backward.seconds(1)
    return layer * len(model.layers) + ends


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def _degrees(
    model: ModelShape, cluster: ClusterShape, gpus: int, refusals: _Refusals
) -> Iterator[tuple[int, int]]:
    """Yield the tensor and pipeline degrees that the model and the nodes allow."""
    for tensor in _divisors(gpus):
        problem = _tensor_problem(model, cluster, tensor)
        if problem is not None:
            refusals.add(problem[0], tensor, partial(str, problem[1]))
            continue
        for pipeline in _divisors(gpus // tensor):
            if pipeline > len(model.layers):
                text = f"pipeline {pipeline} of {len(model.layers)} layers"
                refusals.add("layers", pipeline, partial(str, text))
                continue
            yield tensor, pipeline


def _tensor_problem(
    model: ModelShape, cluster: ClusterShape, tensor: int
) -> tuple[str, str] | None:
    """Return the constraint that a tensor degree breaks, if any, and a text."""
    if tensor == 1:
        return None
    if not model.heads:
        return "tensor parallelism", f"{model.name} has no heads that could be cut"
    for name, count in (
        ("heads", model.heads),
        ("kv_heads", model.kv_heads),
        ("width", model.width),
    ):
        if count and count % tensor:
            return name, f"{name} {count} is not a multiple of tensor {tensor}"
    per_node = cluster.gpus_per_node
    if tensor <= per_node and per_node % tensor:
        return "nodes", f"tensor {tensor} would straddle nodes of {per_node} GPUs"
    if tensor > per_node and tensor % per_node:
        return "nodes", f"tensor {tensor} is not a multiple of a node's {per_node} GPUs"
    return None


def _shapes(
    model: ModelShape, batch: int, data: int, tensor: int, pipeline: int, refusals: _Refusals
) -> Iterator[Strategy]:
    """Yield the strategies of some degrees, each to be tried with more and more saving of memory."""
    if batch % data:
        refusals.add("batch", data, lambda: f"batch {batch} is not a multiple of data {data}")
        return
    per_rank = batch // data
    experts = [1] if not model.experts else [
        one for one in _divisors(data) if model.experts % one == 0
    ]  # fmt: skip
    orders = (False, True) if data > 1 and pipeline > 1 else (False,)
    micro_batch = 1
    while micro_batch <= min(per_rank, _MAX_MICRO_BATCH):
        if per_rank % micro_batch == 0:
            micro_batches = per_rank // micro_batch
            for interleave in _interleaves(model, pipeline, micro_batches):
                for expert in experts:
                    for sequence in (False, True) if tensor > 1 else (False,):
                        for inside in orders:
                            yield Strategy(
                                data=data,
                                tensor=tensor,
                                pipeline=pipeline,
                                expert=expert,
                                sequence=sequence,
                                micro_batch=micro_batch,
                                micro_batches=micro_batches,
                                interleave=interleave,
                                pipeline_inside=inside,
                            )
        micro_batch *= 2


def _interleaves(model: ModelShape, pipeline: int, micro_batches: int) -> Iterator[int]:
    for interleave in _INTERLEAVES if pipeline > 1 else (1,):
        chunks = pipeline * interleave
        even = len(model.layers) % chunks == 0 and micro_batches % pipeline == 0
        if interleave == 1 or even:
            yield interleave


def _first_that_fits(
    estimator: Estimator, cluster: ClusterShape, shape: Strategy, refusals: _Refusals
) -> tuple[Plan | None, int]:
    """Return the fastest plan of a shape, over ZeRO, recomputation and offload, and how many were tried.

    Each of these costs time and saves memory, so of one stage of ZeRO the first that fits is the fastest.
    """
    best: Plan | None = None
    tried = 0
    stages = (0,) if shape.data == 1 else (0, 1) if shape.pipeline > 1 else (0, 1, 2, 3)
    for offload in (False, True):
        if offload and (best is not None or not cluster.host_bytes):
            break
        for zero in stages:
            for recompute in Recompute:
                strategy = _with(shape, zero, recompute, offload)
                tried += 1
                result = estimator.estimate(strategy)
                if not isinstance(result, Plan):
                    _refuse_memory(refusals, cluster, strategy, result)
                    continue
                needed = estimator.host_bytes(strategy)
                if needed > cluster.host_bytes > 0:
                    _refuse_host(refusals, cluster, strategy, needed)
                    continue
                if best is None or result.time.total_s < best.time.total_s:
                    best = result
                break
    return best, tried


def _with(shape: Strategy, zero: int, recompute: Recompute, offload: bool) -> Strategy:
    return Strategy(
        data=shape.data,
        tensor=shape.tensor,
        pipeline=shape.pipeline,
        expert=shape.expert,
        sequence=shape.sequence,
        zero=zero,
        micro_batch=shape.micro_batch,
        micro_batches=shape.micro_batches,
        interleave=shape.interleave,
        recompute=recompute,
        offload=offload,
        pipeline_inside=shape.pipeline_inside,
    )


def _refuse_memory(
    refusals: _Refusals, cluster: ClusterShape, strategy: Strategy, memory: Memory
) -> None:
    def text() -> str:
        parts = {
            "weights": memory.parameters,
            "gradients": memory.gradients,
            "optimizer states": memory.optimizer,
            "activations": memory.activations,
            "gathered or computed again": memory.buffers,
        }
        most = max(parts, key=lambda name: parts[name])
        return (
            f"{strategy}: {memory.total / _GB:.1f} GB of {cluster.usable_bytes / _GB:.1f} on a rank, "
            f"{parts[most] / _GB:.1f} of them {most}"
        )

    refusals.add("GPU memory", memory.total, text)


def _refuse_host(
    refusals: _Refusals, cluster: ClusterShape, strategy: Strategy, needed: float
) -> None:
    def text() -> str:
        return f"{strategy}: {needed / _GB:.0f} GB of a node's {cluster.host_bytes / _GB:.0f}"

    refusals.add("host memory", needed, text)
