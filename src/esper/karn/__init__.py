"""Karn takes telemetry in: it reads run directories, and never takes part in training."""
