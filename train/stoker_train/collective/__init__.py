"""``stoker.collective``: collectives between actors."""
