"""Jobs: attached drivers and their sessions, submitted drivers and their placement, the end of both."""
