"""Parallelism inside a stage: one model cut over ranks by data, tensor and sequence parallelism and ZeRO."""
