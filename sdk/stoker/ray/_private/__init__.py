"""``ray._private``: the few of Ray's internals that its documentation and public programs use."""
