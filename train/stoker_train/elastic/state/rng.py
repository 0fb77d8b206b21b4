"""The random numbers of a replica: those of Python, NumPy, torch and CUDA, as one state.

The dropout of ``stoker_kernels`` draws its seeds from torch's generators and keeps no counter, so it is in
here too. Each rank has its own: it is committed and restored, never sent to others.
"""

from __future__ import annotations

import pickle
import random
import sys
from typing import Any

import torch

__all__ = ("RandomState",)


class RandomState:
    """The global generators of this process. CUDA's is that of the present device, once CUDA is in use."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all generators."""
        state: dict[str, Any] = {
            "python": pickle.dumps(random.getstate(), protocol=5),
            "torch": torch.get_rng_state(),
        }
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            state["numpy"] = pickle.dumps(numpy.random.get_state(legacy=False), protocol=5)
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as where :meth:`state_dict` was called."""
        random.setstate(pickle.loads(state["python"]))
        torch.set_rng_state(state["torch"].cpu())
        if "numpy" in state:
            import numpy

            numpy.random.set_state(pickle.loads(state["numpy"]))
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"].cpu())

    def seed(self, seed: int, generation: int, rank: int) -> None:
        """Begin anew, as a replica that joins: by a function of the three."""
        import numpy

        words = numpy.random.SeedSequence((seed, generation, rank)).generate_state(4)
        first, second, third, fourth = (int(word) for word in words)
        random.seed(first)
        numpy.random.seed(second)
        torch.manual_seed(third << 31 ^ fourth)  # CUDA's too
