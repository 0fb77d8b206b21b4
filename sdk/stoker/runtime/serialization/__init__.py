"""Values, tensors and exceptions to bytes and back."""
