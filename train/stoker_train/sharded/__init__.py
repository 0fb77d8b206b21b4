"""Trains models that are cut over many ranks: data, tensor and pipeline parallel, and ZeRO."""
