"""Commands that start work on a cluster by name: calls of what runs there, and scripts of torchrun."""
