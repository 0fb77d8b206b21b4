"""Optimizer states that live in host memory or in files between steps.

A step brings the states of some parameters at a time to where the parameters are, updates these, and takes
the states back (Ren et al. 2021). Called by the rank's context for a plan with ``offload``, and by users;
works with torch's optimizers and ours, on plain and on cut parameters.
"""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import mkstemp
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from stoker.exceptions import BadRequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

AT_A_TIME_NBYTES = 64 << 20
"""The parameters that are updated together: their states are on the device twice or thrice."""


def offload_optimizer(
    optimizer: torch.optim.Optimizer,
    to: str | os.PathLike[str] = "cpu",
    *,
    at_a_time_nbytes: int = AT_A_TIME_NBYTES,
) -> torch.optim.Optimizer:
    """Keep the states of ``optimizer`` in host memory ("cpu"), or in files of a folder; return it.

    The files have no names: their space is free when the process ends. ``state_dict`` and
    ``load_state_dict`` work as before. BadRequestError for one with ``max_grad_norm``, which would clip by
    the parameters of a moment.
    """
    if getattr(optimizer, "max_grad_norm", None) is not None:
        raise BadRequestError(
            "max_grad_norm does not go with offload, which updates some parameters at a time\n"
            "clip before the step, by ctx.state(max_norm=) or clipping.clip_grad_norm_",
            field="max_grad_norm",
        )
    states = _Offloaded(optimizer, None if to == "cpu" else Path(to), at_a_time_nbytes)
    step = states.step

    def step_in_parts(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        return step(closure)

    optimizer.step = MethodType(step_in_parts, optimizer)  # type: ignore[method-assign]
    optimizer.register_load_state_dict_post_hook(lambda _: states.take_all())
    states.take_all()
    return optimizer


def state_nbytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of states of an optimizer that this rank has, wherever they lie."""
    found = 0
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                own = _local(value)
                found += own.numel() * own.element_size()
    return found


class _Offloaded:
    """The states of one optimizer, and where they are kept."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, folder: Path | None, at_a_time_nbytes: int
    ) -> None:
        self._optimizer = optimizer
        self._step = optimizer.step
        self._step_of = getattr(optimizer, "step_of", None)
        self._folder = folder
        self._at_a_time_nbytes = at_a_time_nbytes
        self._kept: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters, some at a time."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        optimizer = self._optimizer
        sums = None
        for part in self._parts():
            for parameter in part:
                self._bring(parameter)
            try:
                if self._step_of is not None:
                    found = self._step_of(part)
                    sums = found if sums is None else sums + found
                else:
                    self._step_alone(part)
            finally:
                for parameter in part:
                    self._take(parameter)
        if sums is not None:
            optimizer.grad_square_sums = sums  # type: ignore[attr-defined]
        return loss

    def take_all(self) -> None:
        """Move all states that there are away."""
        for parameter in list(self._optimizer.state):
            if isinstance(parameter, torch.Tensor):
                self._take(parameter)

    def _parts(self) -> Iterator[list[torch.Tensor]]:
        part: list[torch.Tensor] = []
        nbytes = 0
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                own = _local(parameter)
                size = own.numel() * own.element_size()
                if part and nbytes + size > self._at_a_time_nbytes:
                    yield part
                    part, nbytes = [], 0
                part.append(parameter)
                nbytes += size
        if part:
            yield part

    def _step_alone(self, part: list[torch.Tensor]) -> None:
        """Run the optimizer's own step with no other parameters in its groups."""
        groups = self._optimizer.param_groups
        before = [group["params"] for group in groups]
        chosen = {id(parameter) for parameter in part}
        try:
            for group in groups:
                group["params"] = [p for p in group["params"] if id(p) in chosen]
            self._step()
        finally:
            for group, params in zip(groups, before, strict=True):
                group["params"] = params

    def _bring(self, parameter: torch.Tensor) -> None:
        """Put a parameter's states where it is."""
        device = _local(parameter).device
        state = self._optimizer.state.get(parameter, {})
        for name in self._kept.get(parameter, ()):
            value = state.get(name)
            if isinstance(value, torch.Tensor) and _local(value).device != device:
                state[name] = _with_local(value, _local(value).to(device, non_blocking=True))

    @torch.no_grad()
    def _take(self, parameter: torch.Tensor) -> None:
        """Put a parameter's states where they are kept."""
        state = self._optimizer.state.get(parameter, {})
        kept = self._kept.setdefault(parameter, {})
        for name, value in list(state.items()):
            if not isinstance(value, torch.Tensor) or value.dim() == 0:
                continue  # a count of steps stays
            own = _local(value)
            if own.device.type == "cpu" and self._folder is None:
                continue
            place = kept.get(name)
            if place is None or place.shape != own.shape or place.dtype != own.dtype:
                place = kept[name] = self._new(own)
            if own.data_ptr() != place.data_ptr() or own.device != place.device:
                place.copy_(own)
                state[name] = _with_local(value, place)

    def _new(self, like: torch.Tensor) -> torch.Tensor:
        """Return memory for one state on the host, laid out as ``like``."""
        if self._folder is None or not like.numel():
            pinned = like.device.type == "cuda"
            return torch.empty_strided(
                like.shape, like.stride(), dtype=like.dtype, device="cpu", pin_memory=pinned
            )
        file, path = mkstemp(prefix="optimizer-state-", dir=self._folder)
        try:
            # A full disk is an error here; in the middle of a write to memory it would be a signal.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file, 0, like.numel() * like.element_size())
            flat = torch.from_file(path, shared=True, size=like.numel(), dtype=like.dtype)
        finally:
            os.close(file)
            Path(path).unlink()
        return flat.as_strided(like.shape, like.stride())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _with_local(tensor: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` with another local part, which may lie on another device than its mesh."""
    if not isinstance(tensor, DTensor):
        return own
    # from_local() would move it to the mesh's device.
    return DTensor(own, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
