"""Simic is the reinforcement learning.

This folder holds the learner alone: PPO over rollouts of any environment. Beside it: ``growth``,
the world of growing networks; ``gym``, Gymnasium's environments; ``run``, the run directory and its
checkpoints; ``training``, the loop that joins them; ``tools``, what one does besides training.
"""
