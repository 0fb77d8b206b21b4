"""The costs of one strategy: memory of its fullest rank and seconds of a step."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from stoker_train.planning.collectives import exchange_s, gather_s, send_s
from stoker_train.planning.memory import (
    Memory,
    ends_bytes,
    head_activation_bytes,
    in_flight,
    layer_bytes,
    state_bytes,
)
from stoker_train.planning.plans import Plan, StepTime
from stoker_train.planning.stages import cut
from stoker_train.planning.strategy import Recompute

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from stoker_train.planning.cluster_shape import ClusterShape
    from stoker_train.planning.model_shape import LayerShape, ModelShape
    from stoker_train.planning.precision import Precision
    from stoker_train.planning.profiles.profile import Pass, Profile
    from stoker_train.planning.strategy import Strategy

    Array = NDArray[np.float64]

Stages = tuple[tuple[int, int], ...]
_BACKWARD = 2.0
"""Operations of a backward pass over those of the forward pass: gradients of inputs and of weights."""


class _Sums(NamedTuple):
    """Sums over the layers before each, of what every layer takes for one micro-batch on one rank."""

    compute_s: Array
    tensor_s: Array
    expert_s: Array
    activation_bytes: Array


class Estimator:
    """The costs of one model on one cluster."""

    def __init__(
        self,
        model: ModelShape,
        cluster: ClusterShape,
        precision: Precision,
        seq_len: int,
        flops_per_s: float,
        profile: Profile | None = None,
    ) -> None:
        self._profile = profile
        self._model = model
        self._cluster = cluster
        self._precision = precision
        self._seq_len = seq_len
        self._flops_per_s = flops_per_s
        self._cuts: dict[tuple[int, float], Stages | None] = {}
        layers = model.layers
        self._uniform = all(layer is layers[0] or layer == layers[0] for layer in layers)
        self._matrix = self._before(lambda layer: layer.matrix_parameters)
        self._other = self._before(lambda layer: layer.other_parameters)
        self._experts = self._before(lambda layer: layer.expert_parameters)
        self._largest = max(layers, key=lambda layer: layer.parameters)

    def estimate(self, strategy: Strategy) -> Plan | Memory:
        """Return the plan of a strategy; where it does not fit, the memory of its fullest rank."""
        sums = self._layer_sums(strategy)
        head_s = self._head_s(strategy)
        stages = self._stages(strategy, sums, head_s)
        memory = self._memory(stages, sums, strategy)
        if memory.total > self._cluster.usable_bytes:
            return memory
        return self._plan(strategy, stages, memory, self._time(strategy, stages, sums, head_s))

    def host_bytes(self, strategy: Strategy) -> float:
        """Return what offloaded optimizer states take of a node's memory."""
        if not strategy.offload:
            return 0.0
        total = self._model.parameters * self._precision.optimizer_bytes
        copies = 1 if strategy.zero else strategy.data
        return total * copies * self._gpus_of_a_node(strategy) / strategy.gpus

    def _gpus_of_a_node(self, strategy: Strategy) -> int:
        return min(self._cluster.gpus_per_node, strategy.gpus)

    def _before(self, value: Callable[[LayerShape], float]) -> Array:
        """Return [i] -> the sum of a value over the layers before i."""
        layers = self._model.layers
        if self._uniform:
            return np.arange(len(layers) + 1, dtype=np.float64) * value(layers[0])
        return np.concatenate([[0.0], np.cumsum([float(value(layer)) for layer in layers])])

    def _layer_sums(self, strategy: Strategy) -> _Sums:
        seq_len, cluster = self._seq_len, self._cluster
        tokens = seq_len * strategy.micro_batch
        nbytes = tokens * self._model.hidden * self._precision.value_bytes
        tensor_s = self._tensor_s(nbytes, strategy)
        expert_link = cluster.link_of(strategy.expert, strategy.data_stride)

        def compute_s(layer: LayerShape) -> float:
            if self._profile is not None:
                return self._profiled_s(layer, strategy, self._profile)
            return tokens * self._flops(layer, strategy) / strategy.tensor / self._flops_per_s

        def expert_s(layer: LayerShape) -> float:
            met = layer.active_experts * self._model.experts if layer.expert_parameters else 0.0
            return 4 * exchange_s(nbytes * met, strategy.expert, expert_link)

        return _Sums(
            self._before(compute_s),
            self._before(lambda _: tensor_s),
            self._before(expert_s),
            self._before(lambda layer: layer_bytes(layer, seq_len, strategy, self._precision)),
        )

    def _tensor_s(self, nbytes: float, strategy: Strategy) -> float:
        """Return the exchange of one layer's tensor parallelism.

        A reduction after attention and one after the MLP, forward and backward; what is computed again needs
        that of attention again, not the last one. With sequences cut each is a reduce-scatter and an
        all-gather apart.
        """
        cluster, ranks = self._cluster, strategy.tensor
        count = 5 if strategy.recompute is Recompute.FULL else 4
        gather = gather_s(nbytes, ranks, cluster.link_of(ranks, 1))
        if strategy.sequence:
            return count * gather * (1.0 + cluster.reduce_scatter_cost)
        return count * 2.0 * gather * cluster.all_reduce_cost

    def _flops(self, layer: LayerShape, strategy: Strategy) -> float:
        """Return the operations of a layer for one token, forward and backward."""
        causal, seq_len = self._model.causal, self._seq_len
        forward = layer.flops_per_token(seq_len, causal=causal)
        flops = forward * (1.0 + _BACKWARD)
        if strategy.recompute is Recompute.FULL:
            return flops + forward
        if strategy.recompute is Recompute.SELECTIVE:
            return flops + layer.score_flops_per_token(seq_len, causal=causal)
        return flops

    def _profiled_s(self, layer: LayerShape, strategy: Strategy, profile: Profile) -> float:
        """Return the seconds of a layer, forward and backward, by those measured of a typical one."""
        whole = 0.0 if strategy.sequence else profile.whole_share
        share = whole + (1.0 - whole) / strategy.tensor
        model, seq_len = self._model, self._seq_len
        typical = model.layers[len(model.layers) // 2]
        scale = layer.flops_per_token(seq_len, causal=model.causal) / typical.flops_per_token(
            seq_len, causal=model.causal
        )

        def seconds(one: Pass) -> float:
            return one.fixed_s + one.sequence_s * strategy.micro_batch * share * scale

        forward, backward = seconds(profile.layer_forward), seconds(profile.layer_backward)
        if strategy.recompute is Recompute.FULL:
            return 2.0 * forward + backward
        if strategy.recompute is Recompute.SELECTIVE:
            again = typical.score_flops_per_token(seq_len, causal=model.causal)
            return (
                forward
                + backward
                + forward * again / typical.flops_per_token(seq_len, causal=model.causal)
            )
        return forward + backward

    def _head_s(self, strategy: Strategy) -> float:
        if self._profile is not None:
            size, profile = strategy.micro_batch, self._profile
            ends = profile.ends_forward.seconds(size) + profile.ends_backward.seconds(size)
            return ends / strategy.tensor
        flops = 2.0 * self._model.hidden * self._model.vocab * (1.0 + _BACKWARD)
        tokens = self._seq_len * strategy.micro_batch
        return tokens * flops / strategy.tensor / self._flops_per_s

    def _stages(self, strategy: Strategy, sums: _Sums, head_s: float) -> Stages:
        """Return the layers of each stage: the fastest cut, else the fastest that fits."""
        count, layers = strategy.pipeline * strategy.interleave, len(self._model.layers)
        if strategy.pipeline == 1 or strategy.interleave > 1:
            ends = [layers * number // count for number in range(count + 1)]
            return tuple(pairwise(ends))
        seconds = np.diff(sums.compute_s + sums.tensor_s + sums.expert_s)
        seconds[-1] += head_s
        key = strategy.pipeline, round(head_s / (float(seconds[0]) or 1.0), 3)
        fastest = self._cuts.get(key) if self._uniform else None
        if fastest is None:
            fastest = self._cuts[key] = cut(seconds, strategy.pipeline)
        assert fastest is not None
        limit = self._cluster.usable_bytes
        if self._memory(fastest, sums, strategy).total <= limit:
            return fastest
        limit -= self._buffer_bytes(strategy)
        nbytes = self._bytes_by_stage(sums, strategy)
        if nbytes.min(axis=0).sum() > limit * strategy.pipeline:
            return fastest  # no cut can help
        return cut(seconds, strategy.pipeline, nbytes, limit) or fastest

    def _bytes_by_stage(self, sums: _Sums, strategy: Strategy) -> Array:
        """Return [stage, layer] -> what the layer takes there; a stage's ends are of its outermost layer."""
        states = self._state_sums(strategy).sum(axis=0)
        kept = np.diff(sums.activation_bytes)
        flights = _in_flight(strategy)
        found: Array = np.diff(states) + flights[:, None] * kept
        found[0, 0] += self._ends(0, strategy).total
        found[-1, -1] += self._ends(strategy.pipeline - 1, strategy).total
        return found

    def _state_sums(self, strategy: Strategy) -> Array:
        """Return [weights, gradients, optimizer] x the sums of their bytes over the layers before each."""
        dense = self._states(1.0, strategy, strategy.data)
        expert = self._states(1.0, strategy, strategy.data // strategy.expert)
        cut_up = self._matrix / strategy.tensor + self._other
        own = self._experts / (strategy.tensor * strategy.expert)
        return np.stack(
            [
                cut_up * getattr(dense, name) + own * getattr(expert, name)
                for name in ("parameters", "gradients", "optimizer")
            ]
        )

    def _states(self, parameters: float, strategy: Strategy, ranks: int) -> Memory:
        found = state_bytes(parameters, strategy.zero, ranks, self._precision)
        return replace(found, optimizer=0.0) if strategy.offload else found

    def _ends(self, stage: int, strategy: Strategy) -> Memory:
        """Return what the embedding and the head take of a stage."""
        parameters = ends_bytes(self._model, stage, strategy) / strategy.tensor
        kept = head_activation_bytes(self._model, stage, self._seq_len, strategy, self._precision)
        return replace(self._states(parameters, strategy, strategy.data), activations=kept)

    def _memory(self, stages: Stages, sums: _Sums, strategy: Strategy) -> Memory:
        """Return the memory of the fullest rank."""
        last = strategy.pipeline - 1
        states = _of_ranks(self._state_sums(strategy), stages, strategy)
        kept = _of_ranks(sums.activation_bytes, stages, strategy) * _in_flight(strategy)
        found = np.concatenate([states, kept[None]])
        for stage in {0, last}:
            ends = self._ends(stage, strategy)
            found[:, stage] += (ends.parameters, ends.gradients, ends.optimizer, ends.activations)
        fullest = int(found.sum(axis=0).argmax())
        weights, gradients, optimizer, activations = map(float, found[:, fullest])
        return Memory(weights, gradients, optimizer, activations, self._buffer_bytes(strategy))

    def _buffer_bytes(self, strategy: Strategy) -> float:
        """Return what is whole for a moment: two gathered layers of ZeRO-3, a layer computed again."""
        found = 0.0
        if strategy.zero == 3:
            share = self._largest.parameters / strategy.tensor
            found += share * (2 * self._precision.weight_bytes + self._precision.gradient_bytes)
        if strategy.recompute is Recompute.FULL:
            whole = replace(strategy, recompute=Recompute.NONE)
            found += layer_bytes(self._largest, self._seq_len, whole, self._precision)
        return found

    def _time(self, strategy: Strategy, stages: Stages, sums: _Sums, head_s: float) -> StepTime:
        p, m, v = strategy.pipeline, strategy.micro_batches, strategy.interleave
        parts = np.stack([sums.compute_s, sums.tensor_s, sums.expert_s])
        seconds = _of_ranks(parts, stages, strategy)
        seconds[0, -1] += head_s
        whole = seconds.sum(axis=0)
        slowest = int(whole.argmax())
        compute_s, tensor_s, expert_s = map(float, seconds[:, slowest])
        sent = self._seq_len * strategy.micro_batch * self._model.hidden
        nbytes = sent * self._precision.value_bytes / (strategy.tensor if strategy.sequence else 1)
        hop = self._cluster.link_of(p, strategy.pipeline_stride)
        pipeline_s = 2 * v * send_s(nbytes, hop) if p > 1 else 0.0
        parameters = self._rank_parameters(strategy, stages)
        return StepTime(
            compute_s=m * compute_s,
            bubble_s=(p - 1) / v * (float(whole[slowest]) + pipeline_s),
            tensor_s=m * tensor_s,
            pipeline_s=m * pipeline_s,
            expert_s=m * expert_s,
            data_s=self._data_s(strategy, parameters, compute_s),
            update_s=self._update_s(strategy, parameters),
        )

    def _rank_parameters(self, strategy: Strategy, stages: Stages) -> float:
        """Return the parameters of the rank that has most, before ZeRO."""
        own = self._matrix / strategy.tensor + self._other
        own = own + self._experts / (strategy.tensor * strategy.expert)
        found = _of_ranks(own, stages, strategy)
        for stage in {0, strategy.pipeline - 1}:
            found[stage] += ends_bytes(self._model, stage, strategy) / strategy.tensor
        return float(found.max())

    def _data_s(self, strategy: Strategy, parameters: float, micro_batch_s: float) -> float:
        """Return the exchange of gradients and weights that no computation hides.

        What computation hides is the cluster's ``overlap`` of it.

        2 P for stages 0 to 2, 3 P for stage 3 (Rajbhandari et al. 2020, section 7), which gathers for each
        micro-batch, as stages 2 and 3 reduce for each. Reductions run beside the backward pass, gathers of
        stage 3 beside both; those of 1 and 2 after the update are in the open.
        """
        ranks = strategy.data
        if ranks == 1:
            return 0.0
        link = self._cluster.link_of(ranks, strategy.data_stride)
        reduction = gather_s(parameters * self._precision.gradient_bytes, ranks, link)
        all_reduction = 2 * reduction * self._cluster.all_reduce_cost
        reduction *= self._cluster.reduce_scatter_cost
        gather = gather_s(parameters * self._precision.weight_bytes, ranks, link)
        micro_batch_s *= self._cluster.overlap
        backward_s = micro_batch_s * _BACKWARD / (1.0 + _BACKWARD)
        m = strategy.micro_batches
        if strategy.zero == 0:
            return max(0.0, all_reduction - backward_s)
        if strategy.zero == 1:
            return max(0.0, reduction - backward_s) + gather
        if strategy.zero == 2:
            return m * max(0.0, reduction - backward_s) + gather
        return m * max(0.0, 2 * gather + reduction - micro_batch_s)

    def _update_s(self, strategy: Strategy, parameters: float) -> float:
        """Return the optimizer's time: its state is read and written once, gradients and weights moved."""
        parameters /= strategy.data if strategy.zero else 1
        if self._profile is not None and self._profile.update_s and not strategy.offload:
            return parameters * self._profile.update_s
        each = self._precision
        moved = parameters * (2 * each.optimizer_bytes + each.gradient_bytes + each.weight_bytes)
        if not strategy.offload:
            return moved / self._cluster.memory_bytes_per_s
        crossing = parameters * (each.gradient_bytes + each.weight_bytes)
        on_host = parameters * each.optimizer_bytes * self._gpus_of_a_node(strategy)
        return (
            send_s(crossing, self._cluster.host) + on_host / self._cluster.host_update_bytes_per_s
        )

    def _plan(self, strategy: Strategy, stages: Stages, memory: Memory, time: StepTime) -> Plan:
        tokens = strategy.batch * self._seq_len
        needed = tokens * self._model.flops_per_token(self._seq_len) * (1.0 + _BACKWARD)
        possible = time.total_s * strategy.gpus * self._flops_per_s
        return Plan(strategy, stages, memory, time, tokens / time.total_s, needed / possible)


def _of_ranks(sums: Array, stages: Stages, strategy: Strategy) -> Array:
    """Return [..., rank of the pipeline] -> the sum over its layers; each has every p-th stage."""
    first, end = np.asarray(stages).T
    runs = sums[..., end] - sums[..., first]
    found: Array = runs.reshape(*sums.shape[:-1], strategy.interleave, strategy.pipeline).sum(
        axis=-2
    )
    return found


def _in_flight(strategy: Strategy) -> Array:
    return np.array([in_flight(stage, strategy) for stage in range(strategy.pipeline)])
