"""What a process is before it does anything: its identity, its loop thread, its one runtime."""
