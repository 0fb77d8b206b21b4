"""Which node: feasibility with reasons, scores, ranking; dry runs and explanations of the same code."""
