"""The options of tasks and actors, with their ``runtime_env``: checked, documented, made into messages."""
