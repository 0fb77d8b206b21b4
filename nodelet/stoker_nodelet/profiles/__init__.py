"""Stacks and profiles of the processes of this node, by their own means and by those of others."""
