"""Keeps the state of a sharded model on disk: written beside the training, read back under any other plan.

``store`` is what a rank uses; ``full_state`` and ``safetensors_files`` need no process group.
"""
