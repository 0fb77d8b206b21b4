"""Accounting for GPUs, device by device.

A fraction below 1 stays on one device, so that two leases share a GPU only when both asked for a
part of it; a whole count takes devices that no lease uses, near each other where their topology is known.
An amount of memory is a fraction as well: the part of a device's memory that it is. A MIG slice is a device
that is no whole GPU: a program can use one at a time. A quarantined device is given to nobody. Ties go to
the lowest index, and nothing depends on the order of calls, so a replay chooses the same devices.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from stoker_scheduler.core.model.resources import GPU, UNIT, InvalidDemandError
from stoker_scheduler.core.model.topology import Topology

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


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Facts about a node's devices, by index.

    ``memory`` are bytes of the whole device, where that is known; ``slices`` are those that are MIG slices;
    ``quarantined`` says why those are given to nobody.
    """

    memory: Mapping[int, int] = field(default_factory=dict)
    slices: Collection[int] = ()
    topology: Topology | None = None
    quarantined: Mapping[int, str] = field(default_factory=dict)


NO_FACTS = DeviceFacts()


class Devices:
    """The GPUs of one node, or a bundle's shares of them, and how much of each is free."""

    __slots__ = ("_closed", "_free", "_wholes", "facts", "total", "total_units", "wholly_free")

    wholly_free: int
    """The number of devices that no lease uses, of those that whole counts take."""

    def __init__(self, shares: Mapping[int, int], facts: DeviceFacts = NO_FACTS) -> None:
        self.total: Shares = dict(sorted(shares.items()))
        self._free = dict(self.total)
        """Free units by device, of those that are not quarantined."""
        self._closed: Shares = {}
        """Units that no lease has, of those that are."""
        self.total_units = sum(shares.values())
        """The units of the idle node."""
        self.learn(facts)

    @staticmethod
    def whole(indices: Iterable[int], facts: DeviceFacts = NO_FACTS) -> Devices:
        """Return the GPUs of a node that no lease uses."""
        return Devices(dict.fromkeys(indices, UNIT), facts)

    def learn(self, facts: DeviceFacts) -> None:
        """Apply what is known now of the same devices: some may be quarantined, or no longer."""
        self.facts = facts
        wholes = [index for index in self.total if index not in facts.slices]
        self._wholes: Collection[int] = wholes if facts.slices and wholes else self.total
        """The devices that whole counts take: slices only where there is nothing else."""
        unused = {**self._free, **self._closed}
        self._free, self._closed = {}, {}
        for index in self.total:
            into = self._closed if index in facts.quarantined else self._free
            into[index] = unused[index]
        self.wholly_free = len(self._free_wholes())

    @property
    def memory(self) -> Mapping[int, int]:
        """Device index -> bytes of the whole device, where that is known."""
        return self.facts.memory

    @property
    def indices(self) -> tuple[int, ...]:
        """The indices of all devices, lowest first."""
        return tuple(self.total)

    @property
    def quarantined(self) -> Mapping[int, str]:
        """Device index -> why it is given to nobody."""
        why = self.facts.quarantined
        return {index: why[index] for index in self._closed}

    @property
    def only_slices(self) -> bool:
        """Whether a whole count above 1 is not possible: no program can use two slices."""
        return bool(self.facts.slices) and all(one in self.facts.slices for one in self.total)

    @property
    def free_units(self) -> int:
        """The units that no lease has, summed over devices (they may be in pieces)."""
        return sum(self._free.values())

    @property
    def free_by_device(self) -> Shares:
        """Units that no lease has by device, quarantined ones included; a copy."""
        if not self._closed:
            return dict(self._free)
        return dict(sorted({**self._free, **self._closed}.items()))

    @property
    def wholes(self) -> int:
        """The number of devices that whole counts take."""
        return len(self._wholes)

    @property
    def largest_free(self) -> int:
        """The most units that are free on any one device."""
        return max(self._free.values(), default=0)

    @property
    def largest_free_bytes(self) -> int:
        """The most memory that is free on any one device."""
        free = self._free.items()
        return max((self.memory.get(i, 0) * units // UNIT for i, units in free), default=0)

    def rooms(self, units: int, nbytes: int = 0) -> int:
        """Return how many parts of ``units``, or of ``nbytes``, at most one device each, are free."""
        if nbytes:
            return sum(free // self.part(index, nbytes) for index, free in self._free.items())
        return sum(free // units for free in self._free.values())

    def whole_rooms(self, units: int) -> int:
        """Return how many times a whole count is free."""
        if units > UNIT and self.only_slices:
            return 0
        return self.wholly_free * UNIT // units

    def part(self, index: int, nbytes: int) -> int:
        """Return the units of a device that ``nbytes`` of its memory are; more than all if not known."""
        memory = self.memory.get(index, 0)
        return -(-nbytes * UNIT // memory) if memory else UNIT + 1

    def typical_units(self, units: int, nbytes: int) -> int:
        """Return the units that a demand takes of some device here, for scores."""
        if not nbytes:
            return units
        return min((self.part(index, nbytes) for index in self.total), default=0)

    def can_serve(self, units: int, nbytes: int = 0) -> bool:
        """Return whether there are devices that would serve ``units``, or ``nbytes`` of one, now."""
        if nbytes:
            return any(free >= self.part(index, nbytes) for index, free in self._free.items())
        if units < UNIT:
            return units == 0 or self.largest_free >= units
        return units <= self.wholly_free * UNIT and (units == UNIT or not self.only_slices)

    def choose(
        self, units: int, nbytes: int = 0, among: Collection[int] | None = None
    ) -> Shares | None:
        """Return the devices that would serve ``units``, or ``nbytes`` of one; None if none would.

        Changes nothing. A fraction goes to the fullest device that still has room (best fit). A whole count
        is of ``among`` alone, if given.
        """
        if nbytes:
            fitting = (
                (free - self.part(index, nbytes), index)
                for index, free in self._free.items()
                if free >= self.part(index, nbytes)
            )
            found = min(fitting, default=None)
            return None if found is None else {found[1]: self.part(found[1], nbytes)}
        if units == 0:
            return {}
        if units < UNIT:
            best = min(
                ((free, index) for index, free in self._free.items() if free >= units), default=None
            )
            return None if best is None else {best[1]: units}
        return self._choose_whole(units // UNIT, among)

    def _choose_whole(self, count: int, among: Collection[int] | None) -> Shares | None:
        topology = self.facts.topology
        free = self._free_wholes()
        if among is not None:
            free = [index for index in free if index in among]
        if len(free) < count or (count > 1 and self.only_slices):
            return None
        chosen = free[:count] if topology is None else topology.nearest(tuple(free), count)[0]
        return dict.fromkeys(chosen, UNIT)

    def _free_wholes(self) -> list[int]:
        free = [index for index, units in self._free.items() if units == UNIT]
        wholes = self._wholes
        return free if wholes is self.total else [index for index in free if index in wholes]

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        quarantined = self.facts.quarantined
        assert self._closed.keys() <= quarantined.keys(), "a closed GPU is in no quarantine"
        assert not self._free.keys() & quarantined.keys(), "a quarantined GPU is open"
        assert self.wholly_free == len(self._free_wholes()), "free GPUs are miscounted"

    def spread(self, count: int) -> int | None:
        """Return the sum of the distances between the ``count`` devices that would be chosen together.

        None where there is no topology, or nothing to choose.
        """
        topology = self.facts.topology
        if topology is None or count < 2:
            return None
        free = self._free_wholes()
        return topology.nearest(tuple(free), count)[1] if len(free) >= count else None

    def can_ever_serve(self, units: int, nbytes: int = 0) -> bool:
        """Return whether ``units``, or ``nbytes`` of one device, would fit if the node were idle."""
        if nbytes:
            return any(self.part(index, nbytes) <= has for index, has in self.total.items())
        if units < UNIT:
            return units <= self.total_units
        return units <= (UNIT if self.only_slices else len(self._wholes) * UNIT)

    def serves(self, shares: Shares, units: int, nbytes: int) -> bool:
        """Return whether ``shares`` are what a demand gets: as many units, or a part of one device."""
        if not nbytes:
            return sum(shares.values()) == units
        return len(shares) == 1 and all(
            has == self.part(index, nbytes) for index, has in shares.items()
        )

    def allocate(self, shares: Shares) -> None:
        """Mark ``shares`` as used. The caller chose them with :meth:`choose`."""
        for index, units in shares.items():
            self._change(index, -units)

    def free(self, shares: Shares) -> None:
        """Mark ``shares`` as free again."""
        for index, units in shares.items():
            self._change(index, units)

    def _change(self, index: int, units: int) -> None:
        if index not in self._free:
            if index in self._closed:  # else the node has lost the device
                self._closed[index] += units
            return
        before = self._free[index]
        after = self._free[index] = before + units
        if (before == UNIT or after == UNIT) and index in self._wholes:
            self.wholly_free += (after == UNIT) - (before == UNIT)

    def copy(self) -> Devices:
        """Return an independent copy, for dry runs."""
        twin = Devices.__new__(Devices)
        twin._free, twin._closed = dict(self._free), dict(self._closed)
        twin.total, twin.total_units = self.total, self.total_units
        twin._wholes, twin.facts = self._wholes, self.facts
        twin.wholly_free = self.wholly_free
        return twin
