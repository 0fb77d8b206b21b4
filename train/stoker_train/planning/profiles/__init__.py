"""Measured seconds of a model's passes, in place of counted operations."""
