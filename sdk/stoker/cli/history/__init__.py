"""Commands about what was: stories of single things, counts and traces of tasks."""
