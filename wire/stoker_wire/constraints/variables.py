"""Environment variables that a runtime_env may not set, for the lease or the node decides them.

Checked at the driver, where a job or an actor is taken, and by the nodelet; a task can still change its own
``os.environ``, which is why devices are no secret (SECURITY.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker_wire.errors import BadRequestError

if TYPE_CHECKING:
    from collections.abc import Iterable

_OF_DEVICES = "the lease sets it: ask for GPUs by num_gpus, or for none by leaving that out"
_OF_STOKER = "variables of Stoker say who a process is, and are set by the node that starts it"
_RESERVED = {"CUDA_VISIBLE_DEVICES": _OF_DEVICES, "CUDA_DEVICE_ORDER": _OF_DEVICES}
_PREFIX = "STOKER_"
_FREE = "STOKER_KERNELS_"
"""Options of stoker_kernels, which is the user's library."""


def check(names: Iterable[str], field: str = "runtime_env.env_vars") -> None:
    """Raise BadRequestError, with the reason, for the first variable that is not the user's to set."""
    for name in names:
        why = _RESERVED.get(name)
        if why is None and name.startswith(_PREFIX) and not name.startswith(_FREE):
            why = _OF_STOKER
        if why is not None:
            raise BadRequestError(
                f"{field}.{name}: this variable cannot be set\n{why}", field=f"{field}.{name}"
            )
