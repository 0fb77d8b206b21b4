"""Objects between nodes: pulled once per node, straight from arena to arena, and spread like rumours.

A runtime that needs an object of another machine asks its own nodelet (``Pulls``), which asks the
object's home where to get it (``Spreading``: from itself, or from a node that has or gets a copy),
and fetches it in chunks into its arena. The other side is ``Serving``. ``Turns`` keeps many
transfers fair to each other, and few enough that control calls stay quick. See ADR 0008.
"""

from stoker_nodelet.transfer.service import Transfer

__all__ = ("Transfer",)
