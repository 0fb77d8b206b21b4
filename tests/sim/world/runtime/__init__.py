"""The sdk's runtimes of a world: their channels, their values, and the calls that workers execute."""
