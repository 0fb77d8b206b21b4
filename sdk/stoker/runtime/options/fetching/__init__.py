"""Code from elsewhere: archives and repositories named by URI, fetched by the caller and made packages."""
