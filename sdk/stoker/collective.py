"""``stoker.collective``: collectives between actors, under the name that users type.

An alias of ``stoker_train.collective``; torch is imported when a group is made, not here.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import stoker_train.collective

if TYPE_CHECKING:
    from stoker_train.collective import *  # noqa: F403  # what editors and type checkers find here

sys.modules[__name__] = stoker_train.collective
