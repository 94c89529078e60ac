"""Grow a module of your own: `esper grow --plugin examples/own_model.py --task own_model ...`."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from esper.kasmina import ModuleHost, Slot
from esper.runtime.data import read_dataset
from esper.runtime.tasks import Task, task


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 3, padding=1)
        self.block = nn.Sequential(nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1))
        self.grows, self.head = Slot(6), nn.Linear(6, 10)

    def forward(self, x):
        x = self.stem(x)
        return self.head(self.grows(x + self.block(x)).mean((2, 3)))


def data():
    x, y = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    digits = TensorDataset(x.float().view(-1, 1, 8, 8) / 16, y)
    parts = random_split(digits, [1197, 300, 300], torch.Generator().manual_seed(0))
    return read_dataset(*(DataLoader(part, batch_size=100) for part in parts), classes=10)


@task
def own_model():
    return Task("own_model", "digits", ModuleHost(Net, 10, (8, 8, 1)), data)
