"""Benchmarks of sharded training, by hand: ``python -m benchmarks.sharded``."""
