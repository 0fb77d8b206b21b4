"""The half of stacks and profiles that a worker does itself; imported when it is asked for."""
