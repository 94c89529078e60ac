"""What ``scripts/gpu_check.py`` measures on a GPU, one module per section, and how it is run."""
