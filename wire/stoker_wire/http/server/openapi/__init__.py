"""The OpenAPI 3.1 document of a service, made for people, for generators of clients, and for fuzzing."""
