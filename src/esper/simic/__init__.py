"""Simic is the reinforcement learning: environments, rewards, rollouts, PPO, checkpoints."""
