"""The scheduler: pure decisions in core, and the service around them."""
