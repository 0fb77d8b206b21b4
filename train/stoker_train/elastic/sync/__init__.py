"""Exchange gradients and models between replicas, by strategies that may change while a job trains."""
