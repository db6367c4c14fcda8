"""A small convolutional network without BatchNorm, so that shards must add up to the full batch.

Its first linear layer is larger than DDP's first bucket, so bucket boundaries are crossed.
"""

from torch import nn

from distcheck.errors import UsageError
from distcheck.workloads.cells.samples import Classifier


class CNN(Classifier):
    """Two 3x3 convolutions with pooling, two linear layers; SGD with momentum."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build the model for images [channels, height, width] from 4 x 4. Raises UsageError."""
        if len(sample_shape) != 3 or min(sample_shape[1:]) < 4:
            raise UsageError(
                f"workload cnn takes images of at least 4x4, not samples of shape {sample_shape}"
            )
        channels, height, width = sample_shape
        return nn.Sequential(
            nn.Conv2d(channels, 8, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * (height // 4) * (width // 4), 320),
            nn.ReLU(),
            nn.Linear(320, classes),
        )


workload = CNN()
