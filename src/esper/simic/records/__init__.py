"""Records: the rollouts of a run as files, written while training and read as whole episodes."""
