"""What is scheduled onto what: nodes, devices, resources, labels and the requirements of a request."""
