"""Jobs: attached drivers and their sessions, submitted drivers and their launch, and the end of both."""
