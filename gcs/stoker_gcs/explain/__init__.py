"""Why something waits, and which record is meant: answers for people, from records and events."""
