"""The parts of a process that come before all others: its identity, its loop thread, its one runtime."""
