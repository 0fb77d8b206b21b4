"""Objects between nodes: pulled once per node, straight from arena to arena, broadcast along a tree.

A runtime that needs an object of another machine asks its own nodelet, which asks the object's home
where to get it (``BroadcastTree``: from the home, or from a node that has or gets a copy) and fetches
it in chunks into its arena (``Pull``). The other end is ``RangeServer``. A ``FairLimiter`` at each end
keeps many transfers fair to each other, and few enough that control calls stay quick. See ADR 0008.
"""

from stoker_nodelet.transfer.service import ROUTES, Transfer

__all__ = ("ROUTES", "Transfer")
