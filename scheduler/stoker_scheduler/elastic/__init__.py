"""Elastic jobs: rounds that decide how many replicas each has, and the steps that bring them there."""
