"""Gymnasium's environments, behind the engine that trains growth policies."""
