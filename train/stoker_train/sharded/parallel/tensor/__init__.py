"""Tensor and sequence parallelism: blocks whose products are cut over ranks, of our models and anyone's."""
