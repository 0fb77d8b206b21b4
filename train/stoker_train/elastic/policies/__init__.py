"""Adapt a job while it trains: policies of the user, and those that are shipped."""
