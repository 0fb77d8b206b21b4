"""The model: nodes, devices, resources, labels, and the requirements of a request."""
