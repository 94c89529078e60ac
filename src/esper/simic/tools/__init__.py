"""Besides training: grow one host, diagnose a task, check a model."""
