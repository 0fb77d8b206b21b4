"""Dry runs: questions that are answered by running the deciding code on a copy of the state."""
