"""Simic is the reinforcement learning package.

The modules of this folder are the learner: PPO over rollouts of any environment. The subpackages
are

- ``algorithms``: how each algorithm is registered, with its settings
- ``graphs``: steps captured as CUDA graphs
- ``impala``: learning by V-trace from the rollouts of an older policy
- ``growth``: environments of growing networks
- ``gym``: Gymnasium environments
- ``run``: the run directory and its checkpoints
- ``records``: rollouts as files
- ``training``: the training loop
- ``distributed``: actors on other machines
- ``offline``: learning from records, without acting
- ``evaluation``: policies against controls on the same hosts
- ``tools``: growing a single host, diagnosing a task, checking a user's task
"""
