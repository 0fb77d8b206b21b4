"""Node agent: workers, devices, the arena, object transfer and logs."""
