"""The user's spans, and the timeline of what ran."""
