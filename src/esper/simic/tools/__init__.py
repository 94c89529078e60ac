"""Tools other than training: grow one host, diagnose a task, check a user's task."""
