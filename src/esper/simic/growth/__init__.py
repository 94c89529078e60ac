"""The environment of a growth policy: N hosts in training, their rewards and rollouts."""
