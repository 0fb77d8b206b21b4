"""Training by a group: an optimizer that exchanges gradients, and states that begin alike."""
