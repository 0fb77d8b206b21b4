"""Benchmarks of elastic training, by hand: ``python -m benchmarks.elastic_training``."""
