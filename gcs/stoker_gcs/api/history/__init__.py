"""Routes of what was: the task history, the state at an earlier time, stories."""
