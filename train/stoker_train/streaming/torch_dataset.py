"""Offer a stream as PyTorch's iterable data set, for a ``DataLoader``.

The only module here that needs torch at import; readers do not import it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import IterableDataset

__all__ = ("StreamDataset",)


class StreamDataset(IterableDataset[Any]):
    """A ``Stream`` for ``DataLoader(..., num_workers=0)``; ``batch_size=None`` where it makes batches itself.

    With workers it raises BadRequestError: readers on the cluster do what they would.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[Any]:
        records: Iterator[Any] = iter(self.stream)
        return records

    def state_dict(self) -> dict[str, Any]:
        """Return the stream's place."""
        state: dict[str, Any] = self.stream.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Go to a place."""
        self.stream.load_state_dict(state)
