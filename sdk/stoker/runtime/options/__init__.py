"""What a user asks for with a call: the options of tasks and actors, and the ``runtime_env`` among them."""
