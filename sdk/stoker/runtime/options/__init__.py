"""The options of tasks and actors, the ``runtime_env`` among them: checked, documented, made into messages."""
