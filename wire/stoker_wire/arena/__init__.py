"""A node's shared memory for objects: recycled files on tmpfs that writers fill and readers map.

Runtimes write and read objects here without asking anybody; the nodelet indexes, trims, spills and
sweeps. What all of them must agree on lies in this package: names and locks (``extents``), the bytes
of an object (``layout``) and the count of bytes in use (``ledger``). See ADR 0006.
"""

from stoker_wire.arena.extents import Arena, Extent
from stoker_wire.arena.layout import ObjectHead, pack_head, read_head, split
from stoker_wire.arena.ledger import Ledger

__all__ = ["Arena", "Extent", "Ledger", "ObjectHead", "pack_head", "read_head", "split"]
