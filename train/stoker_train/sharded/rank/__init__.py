"""A rank of a sharded job: the actor that runs the loop, and the context that the loop gets."""
