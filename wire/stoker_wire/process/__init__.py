"""What a process of ours needs of its machine: event loop, logs, metrics, identity, background work."""
