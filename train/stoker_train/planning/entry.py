"""The call that users make: from a model and a cluster to ranked plans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stoker_train.planning.adapters import shape_of
from stoker_train.planning.plans import Plan
from stoker_train.planning.precision import precision
from stoker_train.planning.search import make_estimator, search

if TYPE_CHECKING:
    from stoker_train.planning.cluster_shape import ClusterShape
    from stoker_train.planning.plans import Plans
    from stoker_train.planning.profiles.profile import Profile
    from stoker_train.planning.strategy import Strategy


def plan_training(
    model: Any,
    *,
    cluster: ClusterShape | None = None,
    batch: int,
    seq_len: int,
    gpus: int = 0,
    dtype: str = "bf16",
    optimizer: str = "adamw",
    profile: float | Profile | None = None,
    limit: int = 10,
) -> Plans:
    """Return the fastest ways to train a model, those that fit, and why others do not.

    ``model`` is a model (``torch.nn.Module``), the config of one of ours or of Hugging Face's, or a
    :class:`ModelShape`. ``cluster`` is by default what the running cluster's records say. ``batch`` is
    sequences in a step over all ranks, ``seq_len`` tokens in each; ``gpus`` how many to use (0: all).
    ``profile`` is what was measured: the seconds of a forward and backward pass of one sequence on one GPU,
    or a :class:`Profile` as :func:`profile_model` makes it; without it, time comes from counted operations
    over the GPU's rate. The ``limit`` best are kept.

    ValueError names the argument that is wrong. Where nothing fits, the plans are empty and say what binds.
    """
    shape = shape_of(model)
    for name, value in (("batch", batch), ("seq_len", seq_len), ("limit", limit)):
        _check_count(name, value)
    if shape.max_seq_len and seq_len > shape.max_seq_len:
        raise ValueError(
            f"plan_training(): seq_len {seq_len} is more than the model takes, {shape.max_seq_len}\n"
            "give a shorter seq_len, or a model with more positions"
        )
    if cluster is None:
        from stoker_train.planning.hardware.cluster_records import running_cluster

        cluster = running_cluster()
    if not 0 <= gpus <= cluster.gpus:
        raise ValueError(
            f"plan_training(): gpus={gpus}, but the cluster has {cluster.gpus} equal GPUs\n"
            f"give gpus from 1 to {cluster.gpus}, or leave it out"
        )
    return search(
        shape,
        cluster,
        batch=batch,
        seq_len=seq_len,
        gpus=gpus or cluster.gpus,
        precision=precision(dtype, optimizer),
        profile=profile,
        limit=limit,
    )


def plan_strategy(
    model: Any,
    strategy: Strategy,
    *,
    cluster: ClusterShape | None = None,
    seq_len: int,
    dtype: str = "bf16",
    optimizer: str = "adamw",
    profile: float | Profile | None = None,
) -> Plan:
    """Return what one strategy of yours takes: its stages, memory and time; arguments as above.

    ValueError where it needs more GPUs than there are, or more memory than one has.
    """
    _check_count("seq_len", seq_len)
    shape = shape_of(model)
    if cluster is None:
        from stoker_train.planning.hardware.cluster_records import running_cluster

        cluster = running_cluster()
    if strategy.gpus > cluster.gpus:
        raise ValueError(
            f"plan_strategy(): the strategy takes {strategy.gpus} GPUs, and the cluster has {cluster.gpus}\n"
            "give smaller degrees; data x tensor x pipeline GPUs train together"
        )
    if strategy.pipeline * strategy.interleave > len(shape.layers):
        raise ValueError(
            f"plan_strategy(): {strategy.pipeline} x {strategy.interleave} stages of "
            f"{len(shape.layers)} layers\ngive fewer stages than the model has layers"
        )
    estimator = make_estimator(shape, cluster, precision(dtype, optimizer), seq_len, profile)
    found = estimator.estimate(strategy)
    if isinstance(found, Plan):
        return found
    raise ValueError(
        f"plan_strategy(): a rank needs {found.total / 1e9:.1f} GB of GPU memory, and has "
        f"{cluster.usable_bytes / 1e9:.1f}\nplan_training() ranks what fits"
    )


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number from 1, got {value!r}")
