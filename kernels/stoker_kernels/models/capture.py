"""A whole training step as one CUDA graph: forward, backward and optimizer without Python in between.

A small model's step is bound by the host: hundreds of launches of a few microseconds each. The graph
records them once and replays them as one. On the CPU the same object runs the step as it is, so a
training loop is written once::

    step = CapturedStep(model, model.optimizer(), (tokens, targets))
    for tokens, targets in batches:
        loss = step(tokens, targets)

Building one trains nothing: weights, optimizer state and random state are put back after the warm-up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

Loss = Callable[..., torch.Tensor]


def second_output(model: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    """Return ``model(*inputs)[1]``: the loss of :class:`~stoker_kernels.models.causal.CausalLM`."""
    loss: torch.Tensor = model(*inputs)[1]
    return loss


class CapturedStep:
    """One training step of fixed shapes.

    ``inputs`` are an example of what the step will be called with: tensors on the model's device.
    ``loss(model, *inputs)`` returns the scalar to minimise. The optimizer is one of ours, or a torch one
    made with ``capturable=True``. Schedules reach a captured step: with ours by changing
    ``param_groups`` as usual, with torch's through a tensor ``lr``. The model stays in the mode (train or
    eval) and with the trainable parameters it has now.

    Raises ``TypeError`` or ``ValueError`` for what a graph cannot hold, and ``RuntimeError`` with the cause
    when the capture itself fails, for example at an operation that waits for the device.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        inputs: Sequence[torch.Tensor],
        *,
        loss: Loss = second_output,
        warmup: int = 3,
    ) -> None:
        self.model, self.optimizer, self._loss_of = model, optimizer, loss
        self.graph: torch.cuda.CUDAGraph | None = None
        self._check(inputs, warmup)
        if self.device.type == "cuda":
            # The graph reads its inputs from here.
            self._inputs = [x.detach().clone() for x in inputs]
            with torch.cuda.device(self.device):
                self._warm_up(warmup)
                self._capture()
        else:
            self._inputs = [torch.empty_like(x, device="meta") for x in inputs]  # shapes alone

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Train on one batch; returns the loss before the update, a scalar without gradient.

        On CUDA it is the same tensor each time, overwritten by the next call, and reading it waits; inputs
        may come from the CPU. Raises ``ValueError`` for other shapes or dtypes than the example's.
        """
        if len(inputs) != len(self._inputs):
            raise ValueError(f"CapturedStep takes {len(self._inputs)} inputs, got {len(inputs)}")
        for number, (new, held) in enumerate(zip(inputs, self._inputs, strict=True)):
            if new.shape != held.shape or new.dtype != held.dtype:
                raise ValueError(
                    f"CapturedStep: input {number} is {tuple(new.shape)} {new.dtype}, captured was "
                    f"{tuple(held.shape)} {held.dtype}: pad the batch, or make a step for each shape"
                )
        if self.graph is None:
            return self._run(inputs)
        for new, held in zip(inputs, self._inputs, strict=True):
            held.copy_(new, non_blocking=True)
        upload = getattr(self.optimizer, "upload_hyperparameters", None)
        if upload is not None:
            upload()
        self.graph.replay()
        return self._loss

    def _run(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Run the step itself. Without gradients to add to, the backward pass writes them."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._loss_of(self.model, *inputs)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _check(self, inputs: Sequence[torch.Tensor], warmup: int) -> None:
        if not inputs or not all(isinstance(x, torch.Tensor) for x in inputs):
            raise TypeError("CapturedStep: inputs must be a sequence of at least one tensor")
        if warmup < 1:
            raise ValueError(f"CapturedStep: warmup must be at least 1 step, got {warmup}")
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        devices = {t.device for t in (*parameters, *self.model.parameters(), *inputs)}
        if len(devices) != 1:
            names = ", ".join(sorted(map(str, devices)))
            raise ValueError(
                f"CapturedStep: parameters and inputs must be on one device, not on {names}"
            )
        self.device = devices.pop()
        if self.device.type not in ("cuda", "cpu"):
            raise ValueError(f"CapturedStep runs on cuda or cpu, not on {self.device.type}")
        if self.device.type == "cpu":
            return
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("CapturedStep: another capture is under way on this stream")
        for group in self.optimizer.param_groups:
            if not group.get("capturable", True):
                raise ValueError(
                    f"CapturedStep: make {type(self.optimizer).__name__} with capturable=True, or use an "
                    f"optimizer of stoker_kernels"
                )
        for module in self.model.modules():
            config: Any = getattr(module, "config", None)
            risky = getattr(config, "checkpoint", False) and getattr(config, "dropout", 0.0)
            if module.training and risky:
                raise ValueError(
                    "CapturedStep: activation checkpointing has to save the random state for dropout, "
                    "which waits for the device: set dropout=0.0 or checkpoint=False"
                )

    def _tensors(self) -> list[torch.Tensor]:
        """Return all that a step changes, besides the optimizer's state."""
        return [*self.model.parameters(), *self.model.buffers()]

    def _warm_up(self, steps: int) -> None:
        """Let libraries set themselves up and kernels compile, on another stream; then undo the training."""
        saved = [t.detach().to("cpu", copy=True) for t in self._tensors()]
        state = {
            p: {k: v.detach().to("cpu", copy=True) for k, v in values.items() if _is_tensor(v)}
            for p, values in self.optimizer.state.items()
        }
        random = torch.cuda.get_rng_state(self.device)
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(steps):
                self._run(self._inputs)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        with torch.no_grad():
            for tensor, before in zip(self._tensors(), saved, strict=True):
                tensor.copy_(before)
            for p, values in self.optimizer.state.items():
                for name, value in values.items():
                    if _is_tensor(value):  # in place: the graph will read it there
                        old = state.get(p, {}).get(name)
                        value.zero_() if old is None else value.copy_(old)
        torch.cuda.set_rng_state(random, self.device)

    def _capture(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)  # gradients shall lie in the graph's memory
        upload = getattr(self.optimizer, "upload_hyperparameters", None)
        if upload is not None:
            upload()
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self.device)
        try:
            # Relaxed: the optimizer pins memory for its table here, which a strict capture forbids.
            with torch.cuda.graph(graph, capture_error_mode="relaxed"):
                self._loss = self._run(self._inputs)
        except RuntimeError as error:
            torch.cuda.set_stream(stream)
            _end_capture(self.device)
            raise RuntimeError(
                f"CapturedStep: the step cannot be captured: {error}. A graph holds no operation that "
                f"waits for the device (.item(), .cpu(), a condition on a value) or allocates by value"
            ) from error
        self.graph = graph


def _end_capture(device: torch.device) -> None:
    """Capture nothing. After a capture that failed torch's generator believes that it goes on, and refuses to

    draw any number outside of it; the end of another capture ends that as well.
    """
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros((), device=device)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
