"""The trace simulator: the real scheduler core in virtual time, on a cluster and a trace from files."""
