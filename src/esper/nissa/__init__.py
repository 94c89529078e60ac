"""Nissa carries telemetry out: events go through one hub to sinks, off the training path."""
