"""Accounting for GPUs, device by device.

A fraction below 1 stays on one device, so that two leases share a GPU only when both asked for a
part of it; a whole count takes devices that no lease uses. Ties go to the lowest index, and nothing
depends on the order of calls, so a replay chooses the same devices.
"""

from __future__ import annotations

from collections.abc import Iterable

from stoker_scheduler.core.model.resources import GPU, UNIT, InvalidDemandError

Shares = dict[int, int]
"""Device index -> units of it (``UNIT`` is the whole device)."""


def check_gpu_units(units: int) -> None:
    """Reject a GPU demand above 1 that is not whole: it would name no set of devices."""
    if units > UNIT and units % UNIT:
        raise InvalidDemandError(
            f"resources.{GPU}",
            f"resources: GPU={units / UNIT:g} is not possible: ask for a fraction below 1 "
            "(a part of one GPU) or for a whole number of GPUs",
        )


class Devices:
    """The GPUs of one node and how much of each is free."""

    __slots__ = ("_free",)

    def __init__(self, indices: Iterable[int]) -> None:
        self._free: Shares = dict.fromkeys(sorted(indices), UNIT)

    @property
    def indices(self) -> tuple[int, ...]:
        """The indices of all devices, lowest first."""
        return tuple(self._free)

    @property
    def total_units(self) -> int:
        """The units of the idle node."""
        return UNIT * len(self._free)

    @property
    def free_units(self) -> int:
        """The units that no lease has, summed over devices (they may be in pieces)."""
        return sum(self._free.values())

    @property
    def free_by_device(self) -> Shares:
        """Free units by device; a copy."""
        return dict(self._free)

    @property
    def wholly_free(self) -> int:
        """The number of devices that no lease uses."""
        return sum(1 for units in self._free.values() if units == UNIT)

    @property
    def largest_free(self) -> int:
        """The most units that are free on any one device."""
        return max(self._free.values(), default=0)

    def choose(self, units: int) -> Shares | None:
        """Return the devices that would serve ``units``, or None; changes nothing.

        A fraction goes to the fullest device that still has room (best fit).
        """
        if units == 0:
            return {}
        if units < UNIT:
            best = min(
                ((free, index) for index, free in self._free.items() if free >= units), default=None
            )
            return None if best is None else {best[1]: units}
        chosen: Shares = {}
        for index, free in self._free.items():
            if free == UNIT:
                chosen[index] = UNIT
                if len(chosen) * UNIT == units:
                    return chosen
        return None

    def can_ever_serve(self, units: int) -> bool:
        """Return whether ``units`` would fit if the node were idle."""
        return units <= self.total_units

    def allocate(self, shares: Shares) -> None:
        """Mark ``shares`` as used. The caller chose them with :meth:`choose`."""
        for index, units in shares.items():
            self._free[index] -= units

    def free(self, shares: Shares) -> None:
        """Mark ``shares`` as free again."""
        for index, units in shares.items():
            self._free[index] += units

    def copy(self) -> Devices:
        """Return an independent copy, for dry runs."""
        twin = Devices(())
        twin._free = dict(self._free)
        return twin
