"""Gymnasium environments, trained by the same learner as growth policies."""
