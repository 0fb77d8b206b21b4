"""The common part of all optimizers: state, parameter groups, hyperparameters on the device, statistics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

import torch
from torch._compile import _disable_dynamo

from stoker_kernels.optim.ops import SQUARE_SUMS, TRUST_SQUARES, UPDATES
from stoker_kernels.optim.reference import TRUST
from stoker_kernels.optim.sharding import (
    SHARD_BIT,
    Across,
    Shards,
    dtensors_exist,
    is_distributed,
    local_of,
    placed_as,
    shards_of,
)
from stoker_kernels.optim.table import is_dense, lies_as
from stoker_kernels.runtime.backend import compute_dtype

REFUSED_OPTIONS = ("amsgrad", "differentiable", "centered")
NOT_NEGATIVE = (
    "lr", "weight_decay", "eps", "momentum", "trust_coefficient", "lr_decay",
    "initial_accumulator_value",
)  # fmt: skip
SEED_BITS = 61


class Batch(NamedTuple):
    """The tensors that one op call updates: of one group, device, sharding and set of dtypes."""

    group: dict[str, Any]
    places: list[int]  # among all parameters
    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    steps: list[torch.Tensor]
    states: tuple[list[torch.Tensor], list[torch.Tensor]]
    hyper: torch.Tensor
    shards: Shards | None
    whole: list[torch.Tensor]  # the parameters themselves, where ``params`` are shards


class FusedOptimizer(torch.optim.Optimizer, ABC):
    """An optimizer whose step is one update launch per dtype signature, whatever the number of tensors.

    On CUDA the kernels run, on the CPU PyTorch's fused ones or the reference. States are kept in at least
    fp32 also for bf16 and fp16 parameters, and carry torch's names, so checkpoints move both ways.

    After ``step()``, :attr:`grad_square_sums` holds each parameter's sum of squared gradients, computed
    in the same pass, in the order of the parameter groups (0 without a gradient), before clipping and after
    the loss scale is divided out. :attr:`grad_square_sum` is their sum; its root is the global norm.
    Reading a value is what synchronises.

    Options of every optimizer:

    ``max_grad_norm``: clip gradients to this global 2-norm, as ``torch.nn.utils.clip_grad_norm_``;
    costs one more read of them. Gradients themselves stay as they are.
    ``stochastic_rounding``, ``seed`` (per group): round bf16 parameters up or down at random, each as likely
    as it is near, so that updates below half a unit in the last place are not lost. The random bits
    depend on seed, step and the element's place alone, so a run can be replayed.
    ``maximize`` (per group).

    A DTensor parameter (FSDP2, tensor parallelism) is updated shard by shard; its states are DTensors like
    it, as ``torch.distributed.checkpoint`` stores them. Square sums, the clipped norm and trust ratios
    are those of the whole tensors: then a step is a collective, one small sum for each kind of sharding.

    ``torch.amp.GradScaler`` hands its scale and its verdict to the kernel: a step with non-finite
    gradients is skipped on the device. In a CUDA graph lr may be a tensor on the device; changes of
    hyperparameters that are numbers reach a captured step by :meth:`upload_hyperparameters`.

    Raises ``ValueError`` for a hyperparameter out of range or a parameter with gaps or overlaps in its
    memory, ``TypeError`` for sparse gradients and complex or integer parameters.
    """

    _step_supports_amp_scaling = True  # read by torch.amp.GradScaler
    rule: ClassVar[str]
    state_names: ClassVar[tuple[str, ...]]

    def __init__(
        self, params: Iterable[Any], defaults: dict[str, Any], max_grad_norm: float | None
    ) -> None:
        if max_grad_norm is not None and not max_grad_norm > 0.0:
            raise ValueError(f"{type(self).__name__}: max_grad_norm must be positive")
        self.max_grad_norm = max_grad_norm
        self.grad_square_sums: torch.Tensor | None = None
        self._uploaded: dict[tuple[int, torch.device], tuple[tuple[float, ...], torch.Tensor]] = {}
        self._places: tuple[list[int], torch.Tensor] | None = None
        super().__init__(params, defaults)

    @property
    def grad_square_sum(self) -> torch.Tensor | None:
        """The sum of squares of all gradients of the last step, a scalar tensor; None before it."""
        return None if self.grad_square_sums is None else self.grad_square_sums.sum()

    @abstractmethod
    def hyper_of(self, group: dict[str, Any], lr: float) -> tuple[float, ...]:
        """Return the group's numbers in the order of ``hyper``."""

    def states_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of the states that the group's parameters have."""
        return self.state_names

    def check(self, group: dict[str, Any]) -> None:
        """Raise ``ValueError`` for a hyperparameter out of range."""
        for name in NOT_NEGATIVE:
            value = group.get(name, 0.0)
            if not (isinstance(value, torch.Tensor) or value >= 0.0):
                raise ValueError(f"{type(self).__name__}: {name} must be at least 0, got {value}")
        for name in ("rho", "alpha"):
            if not 0.0 <= group.get(name, 0.0) <= 1.0:
                raise ValueError(
                    f"{type(self).__name__}: {name} must lie in [0, 1], got {group[name]}"
                )
        if not all(0.0 <= beta < 1.0 for beta in group.get("betas", ())):
            raise ValueError(
                f"{type(self).__name__}: betas must lie in [0, 1), got {group['betas']}"
            )

    def first_value(self, name: str, group: dict[str, Any]) -> float:
        """Return what state ``name`` begins with."""
        return 0.0

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does, with this class's checks."""
        super().add_param_group(param_group)
        try:
            group = self.param_groups[-1]
            self.check(group)
            for p in group["params"]:
                if not p.is_floating_point():
                    raise TypeError(f"{type(self).__name__} takes real parameters, not {p.dtype}")
                self._check_dense(local_of(p))
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def _check_dense(self, p: torch.Tensor) -> None:
        if not is_dense(p):
            raise ValueError(
                f"{type(self).__name__}: a parameter of shape {tuple(p.shape)} has gaps or overlaps "
                f"in memory (strides {p.stride()}): make it .contiguous()"
            )

    @_disable_dynamo  # as torch.optim: torch.compiler.disable would load dynamo at import
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return ``closure()``'s loss, or None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.upload_hyperparameters()
        batches = self._batches()
        if batches:
            self.grad_square_sums = self._update(batches)
        return loss

    @torch.no_grad()
    def step_of(self, params: Iterable[torch.Tensor]) -> torch.Tensor:
        """Update these parameters alone; return the square sums of all, 0 for those not given.

        For :class:`~stoker_kernels.optim.in_backward.InBackward`; leaves :attr:`grad_square_sums` as it is.
        """
        self.upload_hyperparameters()
        return self._update(self._batches(set(params)))

    def _update(self, batches: list[Batch]) -> torch.Tensor:
        """Take the step of ``batches``; return the square sums of all parameters, whole ones."""
        scale = getattr(self, "grad_scale", None)  # set by GradScaler for the time of the call
        found_inf = getattr(self, "found_inf", None)
        across = Across(p for group in self.param_groups for p in group["params"])
        if across and found_inf is not None:
            found_inf = across.max_(local_of(found_inf))
        sums = None
        if self.max_grad_norm is not None:
            sums = self._in_order(batches, [SQUARE_SUMS(b.params, b.grads) for b in batches])
            across.sum_(sums)
            if scale is not None:
                sums = sums / scale.to(sums).square()
            excess = ((sums.sum().sqrt() + 1e-6) / self.max_grad_norm).clamp_(min=1.0)
            scale = excess if scale is None else excess * scale.to(excess)
        squares: list[torch.Tensor | None] = [None] * len(batches)
        if across and self.rule in TRUST:
            squares = self._trust_squares(batches, across, scale)
        updated = []
        for batch, own_squares in zip(batches, squares, strict=True):
            seed = None
            if batch.group["stochastic_rounding"]:
                shard = 0 if batch.shards is None else batch.shards.number
                seed = (batch.group["seed"] + (shard << SHARD_BIT)) % 2**SEED_BITS + 2**SEED_BITS
            device = batch.hyper.device
            arguments = (batch.params, batch.grads, *batch.states, batch.steps, batch.hyper)
            amp = [None if t is None else t.to(device) for t in (scale, found_inf)]
            updated.append(UPDATES[self.rule](*arguments, *amp, seed, batch.places, own_squares))
            if batch.whole:
                torch.autograd.graph.increment_version(batch.whole)
        if sums is None:
            sums = self._in_order(batches, updated)
            across.sum_(sums)
        return sums

    def _trust_squares(
        self, batches: list[Batch], across: Across, scale: torch.Tensor | None
    ) -> list[torch.Tensor | None]:
        """Return what the trust ratios of each batch take, over all shards: (norms, tensors)."""
        own = [
            TRUST_SQUARES(
                self.rule, b.params, b.grads, *b.states, b.steps, b.hyper,
                None if scale is None else scale.to(b.hyper.device),
            )
            for b in batches
        ]  # fmt: skip
        together = self._in_order(batches, own)
        across.sum_(together)
        return [together[:, b.places].to(b.hyper.device) for b in batches]

    def upload_hyperparameters(self) -> None:
        """Copy what changed in ``param_groups`` to the devices; ``step()`` begins with it.

        Call it before replaying a CUDA graph of a step, after a scheduler wrote numbers. It does not wait
        for the device. Within a capture nothing may have changed: ``RuntimeError`` says so.
        """
        for number, group in enumerate(self.param_groups):
            lr = group["lr"]
            on_device = isinstance(lr, torch.Tensor) and lr.device.type != "cpu"
            # -1 is no number's rate: one that replaces the tensor is seen to be new.
            values = self.hyper_of(group, -1.0 if on_device else float(lr))
            for device in {p.device for p in group["params"]}:
                before = self._uploaded.get((number, device))
                if before is None or before[0] != values:
                    before = self._uploaded[number, device] = (
                        values,
                        self._copied(values, device, None if before is None else before[1]),
                    )
                if on_device:
                    before[1][0].copy_(lr.reshape(()), non_blocking=True)

    def _copied(
        self, values: tuple[float, ...], device: torch.device, into: torch.Tensor | None
    ) -> torch.Tensor:
        """Copy ``values`` to ``device``, into the place where graphs read them."""
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{type(self).__name__}: a hyperparameter changed during the capture of a CUDA graph: "
                "run a step before the capture, and use a tensor lr or upload_hyperparameters() later"
            )
        dtype = torch.float64 if device.type == "cpu" else torch.float32
        host = torch.tensor(values, dtype=dtype)
        into = torch.empty_like(host, device=device) if into is None else into
        return into.copy_(host, non_blocking=True)  # pageable memory is staged: no wait

    def _batches(self, only: set[torch.Tensor] | None = None) -> list[Batch]:
        """Return what one op call can update together: one group, device, sharding and set of dtypes."""
        batches: dict[Any, Batch] = {}
        place, dtensors = -1, dtensors_exist()
        for number, group in enumerate(self.param_groups):
            names = self.states_of(group)
            for p in group["params"]:
                place += 1
                grad = p.grad
                if grad is None or (only is not None and p not in only):
                    continue
                state = self.state[p]
                if len(state) <= len(names):
                    self._complete(p, state, names, group)
                whole, shards = p, None
                if dtensors and (is_distributed(p) or is_distributed(grad)):
                    grad = local_of(placed_as(grad, p, f"{type(self).__name__}: a gradient"))
                    p, shards = local_of(p), shards_of(p)
                key = (number, p.device, p.dtype, grad.dtype, shards)
                batch = batches.get(key)
                if batch is None:
                    if grad.is_sparse:
                        raise TypeError(
                            f"{type(self).__name__} takes no sparse gradients: use sparse=False in "
                            "the embedding, or torch.optim.SparseAdam"
                        )
                    hyper = self._uploaded[number, p.device][1]
                    batch = Batch(group, [], [], [], [], ([], []), hyper, shards, [])
                    batches[key] = batch
                if whole is not p:
                    batch.whole.append(whole)
                batch.places.append(place)
                batch.params.append(p)
                batch.grads.append(grad)
                if state["step"].get_device() != p.get_device():
                    state["step"] = state["step"].to(p.device)
                batch.steps.append(state["step"])
                if not lies_as(grad, p) or not p.is_contiguous():
                    self._check_dense(p)
                    if grad.shape != p.shape:
                        raise ValueError(
                            f"{type(self).__name__}: a parameter of shape {tuple(p.shape)} has a "
                            f"gradient of shape {tuple(grad.shape)}"
                        )
                for column, name in zip(batch.states, names, strict=False):
                    own = local_of(state[name]) if dtensors else state[name]
                    if not lies_as(own, p):  # p moved, or got another memory format
                        state[name] = self._moved(state[name], whole)
                        own = local_of(state[name])
                    column.append(own)
        return list(batches.values())

    def _complete(
        self, p: torch.Tensor, state: dict[str, Any], names: tuple[str, ...], group: dict[str, Any]
    ) -> None:
        """Begin the states that a parameter has not yet."""
        begun = any(isinstance(state.get(name), torch.Tensor) for name in names)
        if "step" not in state or not begun:  # SGD's first step with momentum is special
            state["step"] = torch.full((), float(begun), dtype=torch.float32, device=p.device)
        for name in names:
            if not isinstance(state.get(name), torch.Tensor):
                state[name] = torch.full_like(
                    p, self.first_value(name, group), dtype=compute_dtype(p.dtype)
                )

    def _moved(self, state: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``state`` that lies where and as ``p`` does."""
        if state.shape != p.shape:
            raise ValueError(
                f"{type(self).__name__}: a parameter of shape {tuple(p.shape)} has a state of shape "
                f"{tuple(state.shape)}"
            )
        state = placed_as(state, p, f"{type(self).__name__}: a state")
        return torch.empty_like(p, dtype=state.dtype).copy_(state)

    def _in_order(self, batches: list[Batch], sums: list[torch.Tensor]) -> torch.Tensor:
        """Order square sums (..., tensors) by batch -> (..., parameters) as the parameters are."""
        count = sum(len(group["params"]) for group in self.param_groups)
        places = [place for batch in batches for place in batch.places]
        if len(sums) == 1 and len(places) == count:
            return sums[0]
        together = torch.cat([s.to(sums[0]) for s in sums], -1)
        held = self._places
        if held is None or held[0] != places or held[1].device != together.device:
            index = torch.tensor(places).to(together.device, non_blocking=True)
            held = self._places = (places, index)
        everywhere = together.new_zeros((*together.shape[:-1], count))
        return everywhere.index_copy_(-1, held[1], together)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("max_grad_norm", None)
        self.__dict__.setdefault("grad_square_sums", None)
        self.__dict__.setdefault("_uploaded", {})
        self.__dict__.setdefault("_places", None)
        for group in self.param_groups:
            for name in REFUSED_OPTIONS:
                if group.get(name):
                    raise ValueError(f"{type(self).__name__} has no {name}: the state cannot go on")
            group.pop("capturable", None)  # torch's, and False there: a step of ours always is
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "max_grad_norm": self.max_grad_norm}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, but states keep fp32 where torch would round them to the parameter's dtype.

        States that exist are overwritten where they lie: a CUDA graph of a step reads them there.
        """
        held = {p: dict(state) for p, state in self.state.items()}
        super().load_state_dict(state_dict)
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for key, p in zip(ids, params, strict=True):
            for name, saved in state_dict["state"].get(key, {}).items():
                if name == "step":
                    saved = torch.as_tensor(saved, dtype=torch.float32).reshape(())
                    into = torch.empty_like(saved, device=p.device)
                elif name in self.state_names and isinstance(saved, torch.Tensor):
                    saved = placed_as(saved, p, f"{type(self).__name__}: the loaded {name}")
                    into = torch.empty_like(p, dtype=compute_dtype(p.dtype))
                else:
                    continue
                before = held.get(p, {}).get(name)
                if isinstance(before, torch.Tensor) and before.dtype == into.dtype:
                    into = before if lies_as(local_of(before), local_of(into)) else into
                self.state[p][name] = into.copy_(saved)
