"""Policies: observations, action masks, policy networks and policies without a network."""
