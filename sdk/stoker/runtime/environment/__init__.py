"""A ``runtime_env`` as a user writes it: checked, its folders packed and uploaded."""
