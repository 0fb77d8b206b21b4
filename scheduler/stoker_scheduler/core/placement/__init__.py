"""The choice of a node: feasibility with reasons, scores, rankings; dry runs and explanations of these."""
