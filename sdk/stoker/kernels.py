"""``stoker.kernels``: the training kernels, under the name that users type.

An alias of ``stoker_kernels``; torch is imported when an op is first used, not here.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import stoker_kernels

if TYPE_CHECKING:
    from stoker_kernels import *  # noqa: F403  # what editors and type checkers find here

sys.modules[__name__] = stoker_kernels
