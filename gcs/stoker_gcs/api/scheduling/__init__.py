"""Routes of placement groups, queues and elastic jobs, and of what the scheduler itself answers."""
