"""VGG11 with BatchNorm for 3x32x32 images, trained as courses train it on CIFAR-10.

Eight 3x3 convolutions with BatchNorm and ReLU, five poolings, one linear layer 512 -> classes
(configuration A of Simonyan and Zisserman, arXiv:1409.1556, without the hidden linear layers).
"""

from collections.abc import Iterable

import torch
from torch import nn

from distcheck.errors import UsageError
from distcheck.workloads.cells.samples import Classifier

WIDTHS = (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool")


class VGG11(nn.Module):
    """inputs [n, 3, 32, 32] -> logits [n, classes]."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width in WIDTHS:
            if isinstance(width, str):
                layers.append(nn.MaxPool2d(2))
                continue
            layers += [
                nn.Conv2d(channels, width, 3, padding=1),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
            ]
            channels = width
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.classifier(self.features(inputs).flatten(1))
        return logits


class VGG11Workload(Classifier):
    """Cross-entropy; SGD, learning rate 0.1, momentum 0.9, weight decay 1e-4."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build the model for 3x32x32 images (five poolings leave a pixel). Raises UsageError."""
        if sample_shape != (3, 32, 32):
            given = "x".join(map(str, sample_shape))
            raise UsageError(
                f"workload vgg11 takes 3x32x32 images, not {given}; "
                "use --data cifar10 or synthetic, or the workload cnn or mlp"
            )
        return VGG11(classes)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-4)


workload = VGG11Workload()
