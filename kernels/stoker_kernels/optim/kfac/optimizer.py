"""The K-FAC optimizer: it watches a model's layers, and steps along the natural gradient by momentum SGD."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import nn
from torch._compile import _disable_dynamo

from stoker_kernels.optim.kfac.factors import Factors, Inversion, takes
from stoker_kernels.optim.momentum import SGD
from stoker_kernels.optim.sharding import is_distributed


class KFAC(SGD):
    """SGD whose gradients of linear and convolutional layers are multiplied by the inverse Fisher matrix.

    >>> optimizer = KFAC(model, lr=0.05, damping=1e-2)  # doctest: +SKIP

    Hooks on the layers of ``model`` in training mode gather the factors A and G (see ``factors``) in every
    ``factor_every``-th step; moving averages with ``decay`` are kept, and inverted in every
    ``inverse_every``-th, with ``damping``, by ``inversion`` "cholesky" (damping split between the factors) or
    "eigen" (exact, slower). ``kl_clip`` bounds the step: with v the update of those layers and g their
    gradient, lr v is scaled to lr^2 <v, g> <= kl_clip (Osawa et al. 2019); None leaves it. ``lr`` is that
    of all parameters; what has no factors (embeddings, norms, a layer wider than ``largest``, one whose
    weight is used without calling it) moves by SGD.

    The loss must be the mean over rows of a layer's input. The gradients are those of the training loss
    (the empirical Fisher matrix); ``step()`` overwrites them with the update's direction. Under
    ``torch.distributed`` the batch's factors are averaged over ``process_group`` (by default all), one sum
    for all layers, so every process inverts the same matrices: use it with DistributedDataParallel. No
    GradScaler: it would scale G. In fp32 beside a parameter's bf16 or fp16.

    Raises ``ValueError`` for a number out of range and for a sharded (DTensor) model, ``LinAlgError`` for a
    factor that is not finite.
    """

    _step_supports_amp_scaling = False

    def __init__(
        self,
        model: nn.Module,
        lr: float | torch.Tensor = 1e-2,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        damping: float = 1e-3,
        decay: float = 0.95,
        factor_every: int = 1,
        inverse_every: int = 10,
        inversion: Inversion = "cholesky",
        kl_clip: float | None = 1e-3,
        largest: int = 8192,
        process_group: Any = None,
        max_grad_norm: float | None = None,
    ) -> None:
        if not damping > 0.0 or not 0.0 <= decay < 1.0 or (kl_clip is not None and kl_clip <= 0.0):
            raise ValueError(
                "KFAC: damping and kl_clip must be positive, decay in [0, 1), got "
                f"{damping}, {kl_clip}, {decay}"
            )
        if factor_every < 1 or inverse_every < 1:
            raise ValueError(
                "KFAC: factor_every and inverse_every must be at least 1 step, got "
                f"{factor_every}, {inverse_every}"
            )
        if inversion not in get_args(Inversion):
            raise ValueError(f"KFAC: inversion {inversion!r}: expected cholesky or eigen")
        trained = [p for p in model.parameters() if p.requires_grad]
        if any(is_distributed(p) for p in trained):
            raise ValueError("KFAC: the model is sharded (DTensor): use DistributedDataParallel")
        super().__init__(
            trained, lr, momentum, weight_decay=weight_decay, max_grad_norm=max_grad_norm
        )
        self.damping, self.decay, self.kl_clip = damping, decay, kl_clip
        self.factor_every, self.inverse_every = factor_every, inverse_every
        self.inversion: Inversion = inversion
        self.process_group = process_group
        self.steps = 0  # taken
        self.factors: dict[str, Factors] = {}
        self._handles = []
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear | nn.Conv2d) and takes(module, largest):
                factors = self.factors[name] = Factors(module)
                hook = module.register_forward_hook(self._watch(factors), with_kwargs=True)
                self._handles.append(hook)

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _watch(self, factors: Factors) -> Callable[..., None]:
        @_disable_dynamo
        def hook(
            module: nn.Module,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
            output: torch.Tensor,
        ) -> None:
            due = self.steps % self.factor_every == 0
            if due and module.training and output.requires_grad:
                factors.gather_inputs((*args, *kwargs.values())[0])
                output.register_hook(factors.gather_output_gradient)

        return hook

    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return ``closure()``'s loss, or None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.steps % self.factor_every == 0:
            self._absorb()
        if self.steps % self.inverse_every == 0:
            for factors in self.factors.values():
                if factors.a is not None:
                    factors.invert(self.damping, self.inversion)
        self._precondition()
        self.steps += 1
        super().step()
        return loss

    def _absorb(self) -> None:
        """Take the batch's factors into the averages, the same in every process."""
        found = {name: own.take_gathered() for name, own in self.factors.items()}
        many = 1
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            many = torch.distributed.get_world_size(self.process_group)
        if many > 1:
            self._average(found, many)
        # Early averages weigh all batches alike, as in the paper.
        decay = min(self.decay, 1 - 1 / (self.steps // self.factor_every + 1))
        for name, estimate in found.items():
            if estimate is not None:
                self.factors[name].absorb(*estimate, decay)

    def _average(
        self, found: dict[str, tuple[torch.Tensor, torch.Tensor] | None], many: int
    ) -> None:
        """Replace what each process found by the mean over those that found something, in one sum.

        It stays None where no process used the layer.
        """
        parts: list[torch.Tensor] = []
        for name, estimate in found.items():
            own = self.factors[name]
            if estimate is None:
                total = sum(size * size for size in own.sizes)
                parts.append(own.module.weight.new_zeros(total + 1, dtype=own.dtype))
            else:
                parts += [*(t.flatten() for t in estimate), estimate[0].new_ones(1)]
        if not parts:
            return
        flat = torch.cat(parts)
        torch.distributed.all_reduce(flat, group=self.process_group)
        sizes = [own.sizes for own in self.factors.values()]
        sums = flat.split([part for a, g in sizes for part in (a * a, g * g, 1)])
        counts = torch.cat(sums[2::3]).tolist()  # one wait for the GPU
        for (name, own), (a, g), a_sum, g_sum, count in zip(
            self.factors.items(), sizes, sums[::3], sums[1::3], counts, strict=True
        ):
            if count:
                a_mean, g_mean = (part.to(own.dtype) / count for part in (a_sum, g_sum))
                found[name] = (a_mean.view(a, a), g_mean.view(g, g))

    def _precondition(self) -> None:
        products = [own.precondition(self.damping) for own in self.factors.values()]
        given = [product for product in products if product is not None]
        if self.kl_clip is None or not given:
            return
        lr = self.param_groups[0]["lr"]
        size = torch.stack(given).sum() * lr * lr
        scale = (self.kl_clip / size.clamp(min=1e-30)).sqrt().clamp(max=1.0)
        for own, product in zip(self.factors.values(), products, strict=True):
            if product is not None:
                for p in own.module.parameters(recurse=False):
                    if p.grad is not None:
                        p.grad.mul_(scale)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state, and under "kfac" the steps taken and each layer's factors and inverses."""
        layers = {
            name: {"a": own.a, "g": own.g, "inverse": own.inverse}
            for name, own in self.factors.items()
            if own.a is not None
        }
        return {**super().state_dict(), "kfac": {"steps": self.steps, "layers": layers}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned. Raises ``ValueError`` for layers that the model has not."""
        kfac = state_dict["kfac"]
        unknown = sorted(kfac["layers"].keys() - self.factors.keys())
        if unknown:
            raise ValueError(f"KFAC: the state has a layer {unknown[0]!r}, the model has none")
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "kfac"})
        self.steps = kfac["steps"]
        for name, held in kfac["layers"].items():
            own = self.factors[name]
            device = own.module.weight.device
            own.a, own.g = held["a"].to(device, copy=True), held["g"].to(device, copy=True)
            own.inverse = tuple(t.to(device, copy=True) for t in held["inverse"])
