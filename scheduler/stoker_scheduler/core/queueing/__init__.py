"""The order of requests: the queue, the scheduling cycle, reservations and preemption."""
