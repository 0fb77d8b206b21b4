"""Counter-based random numbers by their name of version 0.1: now ``stoker_kernels.primitives.philox``."""

from __future__ import annotations

from stoker_kernels.primitives.philox import *  # noqa: F403
