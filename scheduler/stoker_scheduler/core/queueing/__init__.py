"""Who is next: queues, the scheduling cycle, reservations and preemption."""
