"""The server half: a service is a table of typed routes with the protocol's rules around them."""
