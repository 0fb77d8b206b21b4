"""Drive an elastic job: replicas, generations, checkpoints and decisions."""
