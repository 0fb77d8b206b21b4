"""The encoding of values, tensors and exceptions as bytes."""
