"""Stoker keeps GPUs fed: a cluster scheduler for Python."""
