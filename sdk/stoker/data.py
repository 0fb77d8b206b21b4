"""``stoker.data``: streams of records from files, under the name that users type.

An alias of ``stoker_train.streaming``; nothing of it is loaded before a name is used.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import stoker_train.streaming

if TYPE_CHECKING:
    from stoker_train.streaming import *  # noqa: F403  # what editors and type checkers find here

sys.modules[__name__] = stoker_train.streaming
