"""A policy on a job that is only computed: steps timed by a model, noise as a function of progress.

Users try a policy with it before they deploy it; it calls the hooks as a replica does. No cluster and no
torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker_train.elastic.policies.policy import Actions, Metrics, Policy, Request

if TYPE_CHECKING:
    from stoker_goodput.efficiency import GradientNoise
    from stoker_goodput.throughput import ThroughputParams


@dataclass(frozen=True, slots=True)
class Simulated:
    """One step of a simulated job, and what was asked for after it."""

    metrics: Metrics
    requests: tuple[Request, ...]


def simulate(
    policy: Policy,
    *,
    params: ThroughputParams,
    noise: Callable[[float], GradientNoise],
    base_batch: int,
    work: float,
    loss: Callable[[float], float] = lambda progress: math.exp(-3.0 * progress),
    replicas: int = 1,
    max_replicas: int = 64,
    gpus_per_node: int = 8,
    steps_per_epoch: int = 100,
    resize_s: float = 1.0,
    most_steps: int = 1_000_000,
) -> tuple[Simulated, ...]:
    """Run a policy on a job of ``work`` steps of M0 samples, and return its steps.

    ``noise`` and ``loss`` are functions of progress, from 0 to 1. A step of M samples is worth AdaScale's
    gain. Requests are met at the next step; a resize takes ``resize_s`` and gives what was asked for,
    ``max_replicas`` at most. Strategies change a name only: their speed is no part of the model. It ends
    after ``most_steps``.
    """
    batch, done, elapsed_s, gpu_s, sync, factor = base_batch, 0.0, 0.0, 0.0, "all_reduce", 1.0
    actions = Actions()
    steps: list[Simulated] = []

    def metrics(step: int, step_s: Sequence[float] = ()) -> Metrics:
        progress = min(1.0, done / work)
        now = noise(progress)
        gain = float(now.gain(batch / base_batch))
        return Metrics(
            step=step,
            epoch=step // steps_per_epoch,
            elapsed_s=elapsed_s,
            gpu_hours=gpu_s / 3600.0,
            replicas=replicas,
            nodes=-(-replicas // gpus_per_node),
            batch=batch,
            base_batch=base_batch,
            lr=factor,
            loss=loss(progress),
            gns=now.noise_scale(base_batch),
            grad_variance=now.var,
            grad_square=now.sqr,
            gain=gain,
            goodput=gain * base_batch / step_s[0] if step_s else math.nan,
            step_s=tuple(step_s),
            compute_s=tuple(step_s),
            sync=sync,
        )

    policy.before_train(metrics(0), actions)
    for step in range(most_steps):
        if step % steps_per_epoch == 0:
            policy.before_epoch(metrics(step), actions)
        policy.before_step(metrics(step), actions)
        nodes = -(-replicas // gpus_per_node)
        seconds = float(params.step_time(nodes, replicas, batch / replicas))
        done += float(noise(min(1.0, done / work)).gain(batch / base_batch))
        elapsed_s += seconds
        gpu_s += seconds * replicas
        now = metrics(step + 1, [seconds] * replicas)
        policy.after_step(now, actions)
        if (step + 1) % steps_per_epoch == 0:
            policy.after_epoch(now, actions)
        requests = actions.take()
        steps.append(Simulated(now, requests))
        stops = done >= work
        for request in requests:
            if request.kind == "resize" and min(request.value, max_replicas) != replicas:
                replicas = min(request.value, max_replicas)
                elapsed_s += resize_s
                gpu_s += resize_s * replicas
            elif request.kind == "set_batch_size":
                batch = request.value
            elif request.kind == "set_sync":
                sync = request.value["name"]
            elif request.kind == "set_lr":
                factor = request.value
            stops = stops or request.kind == "stop"
        if stops:
            break
    if steps:
        policy.after_train(steps[-1].metrics, actions)
    return tuple(steps)
