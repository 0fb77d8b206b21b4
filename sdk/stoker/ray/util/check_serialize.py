"""``ray.util.check_serialize``."""

from stoker.ray.mapping.calls import FailureTuple, inspect_serializability

__all__ = ("FailureTuple", "inspect_serializability")
