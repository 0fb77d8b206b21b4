"""Global control store: tables, stores, the HTTP API and its watches."""
