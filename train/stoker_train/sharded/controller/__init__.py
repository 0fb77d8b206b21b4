"""The controller of a sharded job: the driver of its job, which places the gang and begins it anew."""
