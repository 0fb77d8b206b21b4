"""Run the loop of the user in an actor, in one generation after the other."""
