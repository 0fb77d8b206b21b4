"""The data path: frames between processes, byte ranges between nodes, task history on its way to SQL."""
