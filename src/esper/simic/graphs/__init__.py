"""CUDA graphs of the rollout step and of the update."""
