"""Storing what a fine-tuning method adds to a frozen model: the tensors of its own, by name.

Called by ``lora``, ``prefix`` and ``prompt``.
"""

from __future__ import annotations

import torch


@torch.no_grad()
def take_over(own: dict[str, torch.Tensor], state: dict[str, torch.Tensor], name: str) -> None:
    """Copy ``state`` into the tensors of ``own``. Raises ``ValueError`` where names or shapes differ."""
    if own.keys() != state.keys():
        odd = sorted(own.keys() ^ state.keys())
        raise ValueError(f"{name}: {len(odd)} names differ from the model's, as {odd[0]}")
    for key, tensor in own.items():
        if state[key].shape != tensor.shape:
            raise ValueError(
                f"{name}: {key} is {tuple(state[key].shape)}, the model's is {tuple(tensor.shape)}"
            )
    for key, tensor in own.items():
        tensor.copy_(state[key])
