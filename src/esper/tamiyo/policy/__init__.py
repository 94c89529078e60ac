"""The learned policy: observations, action masks and recurrent networks."""
