"""Feed each replica its share of every step, each sample once."""
