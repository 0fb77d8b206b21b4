"""Elastic training jobs: how many GPUs each gets, round by round. Pure decisions, as all of the core."""
