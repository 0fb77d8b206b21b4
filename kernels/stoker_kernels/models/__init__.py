"""Small models whose every hot op is ours; the training examples and the convergence tests use them."""
