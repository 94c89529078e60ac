"""Runtime knows the tasks: which host learns what from which data, within which budget."""
