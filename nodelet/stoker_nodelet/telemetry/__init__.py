"""What a nodelet knows of what happened: logs, exits, memory, task history."""
