"""More members for one object: its class becomes a class of its own that inherits from the one it had.

Called by tensor parallelism, recomputation and batch norms, whose modules keep their place, parameters and
names. FSDP2 does the same with the modules that it wraps.
"""

from __future__ import annotations

from typing import Any


def extend(one: Any, members: dict[str, Any]) -> None:
    """Give ``one`` members that come before those of its class; it stays an instance of that class."""
    kind = type(one)
    one.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, **members})
