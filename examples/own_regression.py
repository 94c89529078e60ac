"""Grow a perceptron that predicts a number, and rebuild it: `python examples/own_regression.py`."""

import sys
import tempfile

import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import esper


def perceptron():
    return nn.Sequential(
        nn.Linear(10, 16),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(16, 16),
        nn.ReLU(),
        nn.Linear(16, 1),
    )


def loaders():
    x, y = (torch.from_numpy(part).float() for part in load_diabetes(return_X_y=True))
    patients = TensorDataset(20.0 * x, (y - y.mean()) / y.std())
    parts = random_split(patients, [262, 90, 90], torch.Generator().manual_seed(0))
    return [DataLoader(part, batch_size=32, shuffle=i == 0) for i, part in enumerate(parts)]


def main(epochs=40):
    torch.manual_seed(0)
    train, validation, test = loaders()
    result = esper.grow(
        perceptron(),
        train,
        validation,
        loss="mse",
        policy="heuristic",
        epochs=epochs,
        test_loader=test,
        clip=1.0,
    )
    print(result.seeds, f"explained variance on test {result.test.score:.3f}")
    folder = result.save(tempfile.mkdtemp())
    state = torch.load(folder / "state_dict.pt", weights_only=True)
    again = esper.load_grown(perceptron(), state).eval()
    inputs = next(iter(test))[0]
    assert torch.equal(again(inputs), result.model.eval()(inputs))
    return result


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
