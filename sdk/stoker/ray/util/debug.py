"""``ray.util.debug``."""

from stoker.ray.mapping.calls import log_once
from stoker.ray.mapping.lacking import nothing

disable_log_once_globally = enable_periodic_logging = reset_log_once = nothing

__all__ = (
    "disable_log_once_globally",
    "enable_periodic_logging",
    "log_once",
    "reset_log_once",
)
