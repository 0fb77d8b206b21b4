"""``stoker.kernels``: the training kernels, under the name that users type.

An alias of ``stoker_kernels``; torch is imported when an op is first used, not here.
"""

from __future__ import annotations

import sys

import stoker_kernels

sys.modules[__name__] = stoker_kernels
