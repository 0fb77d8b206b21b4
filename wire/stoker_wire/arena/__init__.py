"""A node's shared memory for objects: recycled files on tmpfs that writers fill and readers map.

Runtimes write and read objects here without asking any process; the nodelet indexes, trims, spills and
sweeps. This package holds the rules that all of them follow: names and locks of files (``extents``),
the bytes of an object (``layout``), read-only mappings (``views``) and the bytes in use
(``byte_quota``). See ADR 0006.
"""

from stoker_wire.arena.byte_quota import ByteQuota
from stoker_wire.arena.extents import Arena, Extent
from stoker_wire.arena.layout import ObjectHead, pack_head, read_head, split

__all__ = ["Arena", "ByteQuota", "Extent", "ObjectHead", "pack_head", "read_head", "split"]
