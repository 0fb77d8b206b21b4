"""``stoker.ps``: parameter servers, under the name that users type.

An alias of ``stoker_train.parameter_server``, which imports NumPy, and torch only for its ``Embedding``.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import stoker_train.parameter_server

if TYPE_CHECKING:
    from stoker_train.parameter_server import *  # noqa: F403  # what editors and type checkers find here

sys.modules[__name__] = stoker_train.parameter_server
