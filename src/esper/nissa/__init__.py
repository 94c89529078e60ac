"""Nissa writes telemetry: events go through one hub to sinks, off the training path."""
