"""Runtime defines the tasks: host, data and training budget."""
