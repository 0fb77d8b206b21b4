"""What only a driver does: it is a job, shows output, says what it waits for."""
