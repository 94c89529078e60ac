"""Grow a network that Lightning trains: `python examples/own_lightning.py [EPOCHS] [POLICY]`."""

import sys

import lightning
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import esper


class WideningCallback(lightning.Callback):
    """Makes the layers of ``module.model`` wider after a tenth of the epochs."""

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == trainer.max_epochs // 10:
            optimizer, loader = trainer.optimizers[0], trainer.train_dataloader
            print(esper.widen(module.model, loader, optimizer=optimizer))


class GrowthCallback(lightning.Callback):
    """Grows ``module.model`` while a trainer fits ``module``.

    ``module.loss(batch)`` is the mean loss of a batch. The first optimizer trains the seeds too.
    """

    def __init__(self, policy="rule", **options):
        self.policy, self.options, self.growth = policy, options, None

    def on_train_start(self, trainer, module):
        self.growth = esper.Growth(
            module.model,
            trainer.optimizers[0],
            policy=self.policy,
            epochs=trainer.max_epochs,
            validate=lambda: self.validate(trainer, module),
            higher_is_better=False,
            **self.options,
        )

    def validate(self, trainer, module):
        total, count = 0.0, 0
        for batch in trainer.val_dataloaders:
            batch = module.transfer_batch_to_device(batch, module.device, 0)
            total += float(module.loss(batch)) * len(batch[0])
            count += len(batch[0])
        return total / count

    def on_train_epoch_end(self, trainer, module):
        self.growth.step(train_loss=float(trainer.callback_metrics["train_loss"]))


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 8, 3, stride=2, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 10),
        )

    def loss(self, batch):
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def training_step(self, batch):
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch):
        images, labels = batch
        found = self.model(images).argmax(1) == labels
        self.log("accuracy", found.float().mean(), batch_size=len(labels))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        epochs = self.trainer.max_epochs
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)]


def loaders():
    x, y = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    digits = TensorDataset(x.float().view(-1, 1, 8, 8) / 16, y)
    parts = random_split(digits, [1197, 300, 300], torch.Generator().manual_seed(0))
    return [DataLoader(part, batch_size=64, shuffle=i == 0) for i, part in enumerate(parts)]


def main(epochs=30, policy="widen"):
    lightning.seed_everything(0, verbose=False)
    train, validation, test = loaders()
    module = Classifier()
    callback = WideningCallback() if policy == "widen" else GrowthCallback(policy)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, train, validation)
    found = trainer.validate(module, test, verbose=False)[0]
    print(f"test accuracy {100 * found['accuracy']:.1f} %")
    return module


if __name__ == "__main__":
    main(*(int(each) if each.isdigit() else each for each in sys.argv[1:]))
