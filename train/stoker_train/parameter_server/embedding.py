"""A torch module whose weights are a sparse table: its forward pass pulls rows, its backward pass pushes.

The only module here that imports torch; reached as ``stoker.ps.Embedding``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stoker_train.parameter_server.client.tables import SparseTable
    from stoker_train.parameter_server.client.worker import Worker


class Embedding(torch.nn.Module):
    """Rows of a table, as ``torch.nn.Embedding`` has those of its weight; on the device of the keys.

    With a ``worker`` gradients are part of its step; without, they are pushed in the backward pass. Evaluated
    without gradients, it makes no rows.
    """

    def __init__(self, table: SparseTable, worker: Worker | None = None) -> None:
        super().__init__()
        self.table, self.worker = table, worker

    def forward(self, keys: torch.Tensor) -> torch.Tensor:
        """Return (*keys, width) rows."""
        once, places = torch.unique(keys, return_inverse=True)
        wanted = once.cpu().numpy()
        is_training = torch.is_grad_enabled()
        if self.worker is not None and is_training:
            pulled = self.worker.pull(self.table, wanted)
        else:
            pulled = self.table.pull(wanted, create=is_training)
        rows = torch.from_numpy(np.array(pulled)).to(keys.device)
        if is_training:
            rows.requires_grad_()
            rows.register_hook(lambda gradient: self._push(wanted, gradient))  # type: ignore[no-untyped-call]
        return torch.nn.functional.embedding(places, rows)

    def _push(self, keys: NDArray[np.int64], gradient: torch.Tensor) -> None:
        values = gradient.detach().cpu().numpy()
        if self.worker is not None:
            self.worker.push(self.table, keys, values)
        else:
            self.table.push(keys, values)
