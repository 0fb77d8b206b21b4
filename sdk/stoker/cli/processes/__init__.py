"""Commands about running processes: their output, their stacks and their profiles."""
