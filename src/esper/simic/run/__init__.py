"""The run directory: settings, checkpoints, the lock of its writer, and crash-safe writes."""
