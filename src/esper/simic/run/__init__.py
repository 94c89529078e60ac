"""The directory of a run: settings, checkpoints, one writer, and writes that survive a crash."""
