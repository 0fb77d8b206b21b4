"""Routes of what users store: keys, blobs and detached objects."""
