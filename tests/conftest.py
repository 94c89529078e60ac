"""Settings of the whole suite. Its presence also puts this folder on the import path."""

import torch

torch.set_num_threads(1)
