"""The worker's half of a runtime: calls are taken, run on the user's code, and their results sent back."""
