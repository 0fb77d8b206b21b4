"""The worker's half: takes calls, runs the user's function, sends results back."""
