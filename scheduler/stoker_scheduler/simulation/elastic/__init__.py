"""Elastic training in virtual time: jobs that go by measured profiles, and policies beside each other."""
