"""Simic is the reinforcement learning package.

The modules of this folder are the learner: PPO over rollouts of any environment. The subpackages
are ``graphs`` (steps captured as CUDA graphs), ``growth`` (environments of growing networks),
``gym`` (Gymnasium environments), ``run`` (the run directory and its checkpoints), ``training`` (the
training loop) and ``tools`` (growing a single host, diagnosing a task, checking a user's task).
"""
