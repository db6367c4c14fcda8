"""A small model described by its name, as `distcheck explore` generates.

An example is `generated:linear3.bias-scale;adam`; `distcheck.records.generated_words` defines the
words.

There is no cancellation: inputs, weights and cotangents are positive, so every gradient is a sum of
positive terms, over the samples and within the network. A gradient that is a small difference of
large terms would be as small as its rounding errors, and correct code would differ from the full
batch by more than full batch float32 permits. For the same reason, layers are followed by tanh,
which has no kink. No layer increases magnitudes, however many are stacked: for large inputs of
tanh, the slope 1 - tanh^2 would be a small difference.

BatchNorm is the exception: gradients through it sum to zero. It precedes every layer that trains,
and a sigmoid makes its results positive again. The gradient of BatchNorm's weight is a difference
of larger terms, so full batch float32 compares it on the scale of the gradient of its bias.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from distcheck.contract import Batch, Training
from distcheck.records import ModelLayout, TensorSpec
from distcheck.records.generated_words import (
    PREFIX,
    SHAPE,
    GeneratedLayer,
    GeneratedModelSpec,
    parse_model_words,
)
from distcheck.workloads.datasets.synthetic import hash24

LEARNING_RATE = 2.0**-10
WEIGHT_DECAY = 0.5
RATES = (0.25, 1.0, 0.125)  # factors of it, step by step, repeated
_CHOSEN_BELOW = 1.0  # samples whose first number, in [0.5, 1.5), is lower use rare layers
# State of torch's optimizers for each parameter with a gradient.
STATE = {"sgd": (), "momentum": ("momentum_buffer",), "adam": ("exp_avg", "exp_avg_sq", "step")}
_KERNEL = 2
_COLUMNS = SHAPE[0] * SHAPE[1] * SHAPE[2]


def random_between(keys: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Return pseudorandom numbers in [low, high) from int64 keys of any shape; float32."""
    return hash24(keys).to(torch.float32).div_(2**24).mul_(high - low).add_(low)


def _weight(*shape: int, fan_in: int) -> torch.Tensor:
    """Return random positive weights [shape] whose sum over `fan_in` inputs is about 1."""
    return torch.empty(shape).uniform_(0.5, 1.5).div_(fan_in)


class Dense(nn.Module):
    """[n, features] -> tanh of [n, size], or with `tied` back to [n, features]."""

    def __init__(self, features: int, layer: GeneratedLayer) -> None:
        super().__init__()
        weight = _weight(layer.size, features, fan_in=features)
        if "strided" in layer.marks:
            weight = weight.t().contiguous().t()
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(_weight(layer.size, fan_in=4)) if "bias" in layer.marks else None
        self.tied = "tied" in layer.marks
        self.features = features if self.tied else layer.size

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Apply one linear map, or two with the same weight."""
        outputs = torch.tanh(nn.functional.linear(inputs, self.weight, self.bias))
        if not self.tied:
            return outputs
        # In the other direction, the weights also sum to about 1.
        back = nn.functional.linear(outputs, self.weight.t()) * (self.features / outputs.shape[1])
        return torch.tanh(back)


class Conv(nn.Module):
    """[n, channels, height, width] -> tanh of [n, size, height - 1, width - 1]."""

    def __init__(self, channels: int, layer: GeneratedLayer) -> None:
        super().__init__()
        fan_in = channels * _KERNEL**2
        weight = _weight(layer.size, channels, _KERNEL, _KERNEL, fan_in=fan_in)
        if "strided" in layer.marks:
            weight = weight.contiguous(memory_format=torch.channels_last)
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(_weight(layer.size, fan_in=4)) if "bias" in layer.marks else None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.tanh(nn.functional.conv2d(inputs, self.weight, self.bias))


class Scale(nn.Module):
    """Multiplies its input by one scalar (0-d) parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.empty(()).uniform_(0.5, 1.0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * self.factor


class Table(nn.Module):
    """The mean of each input and a weighted sum of `size` parameters."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.entries = nn.Parameter(torch.empty(size).uniform_(0.5, 1.5))
        self.pattern = (
            random_between(torch.arange(size), 0.5, 1.5) / size
        )  # a constant, not a buffer

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs + (self.entries * self.pattern.to(self.entries)).sum()) / 2


class RunningMeanLayer(nn.Module):
    """Tracks the mean of its inputs in a buffer; returns the inputs unchanged."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.75).add_(inputs.mean(), alpha=0.25)
        return inputs


class Norm(nn.BatchNorm2d):
    """[n, channels, height, width] -> the same shape, between 0 and 1."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(super().forward(inputs))


class Chain(nn.Sequential):
    """A sequence of layers. Layers in `rare` apply only to the `chosen` samples [n], and are
    skipped without them. Each adds half of the mean of its output to a chosen sample.
    """

    chosen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.rare: set[str] = set()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Run the layers. The output has the shape of the last layer that is not in `rare`."""
        for name, layer in self._modules.items():
            assert layer is not None
            if name not in self.rare:
                inputs = layer(inputs)
            elif bool(self.chosen.any()):
                each = layer(inputs).flatten(1).mean(1)
                shape = (-1, *(1 for _ in inputs.shape[1:]))
                mixed = (inputs + each.view(shape)) / 2
                inputs = torch.where(self.chosen.view(shape), mixed, inputs)
        return inputs


class Model(Chain):
    """The outermost module, which determines the chosen samples."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Run the layers on inputs [n, 2, 4, 4]."""
        chosen = inputs[:, 0, 0, 0] < _CHOSEN_BELOW
        for module in self.modules():
            if isinstance(module, Chain):
                module.chosen = chosen
        return super().forward(inputs)


class GeneratedSamples:
    """Numbers in [0.5, 1.5), 2x4x4 per sample; the label of a sample is its index."""

    shape = SHAPE
    classes = 1

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def size(self, *, train: bool) -> int:
        """Return the described number of samples; the test split has the same number."""
        return self._samples

    def read(
        self, ids: torch.Tensor, *, train: bool, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs [n, 2, 4, 4] and labels [n]."""
        rows = ids if train else ids + 10**6
        keys = rows.unsqueeze(1) * 4099 + torch.arange(_COLUMNS)
        return random_between(keys, 0.5, 1.5).to(dtype).view(-1, *SHAPE), rows


class Generated:
    """The workload that a description defines."""

    def __init__(self, words: GeneratedModelSpec) -> None:
        self._words = words
        self.training = Training(accumulate=words.accumulate)
        if words.groups:  # the loop checks whether there is such a method
            self.groups = self._groups
        if words.schedule:
            self.schedule = self._schedule

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build the layers; inputs are [n, 2, 4, 4]."""
        within: list[Chain] = [Model()]
        channels, side, features = SHAPE[0], SHAPE[1], 0
        for layer in self._words.layers:
            del within[layer.nested + 1 :]
            while len(within) <= layer.nested:
                within[-1].append(inner := Chain())
                within.append(inner)
            rare = "absent" in layer.marks
            if layer.kind == "conv":
                made: nn.Module = Conv(channels, layer)
                if not rare:
                    channels, side = layer.size, side - _KERNEL + 1
            elif layer.kind == "linear":
                if not features:
                    features = channels * side * side
                    within[-1].append(nn.Flatten())
                made = dense = Dense(features, layer)
                features = features if rare else dense.features
            else:
                made = self._small(layer)
            if rare:
                within[-1].rare.add(str(len(within[-1])))
            within[-1].append(made.requires_grad_("frozen" not in layer.marks))
        return within[0]

    @staticmethod
    def _small(layer: GeneratedLayer) -> nn.Module:
        if layer.kind == "table":
            return Table(layer.size)
        if layer.kind == "norm":
            return Norm(SHAPE[0])
        return Scale() if layer.kind == "scale" else RunningMeanLayer()

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the mean over samples of the model's output times a weight per sample."""
        weights = random_between(batch.labels * 8191 + 5, 0.5, 1.5).to(batch.inputs)
        loss: torch.Tensor = (model(batch.inputs).flatten(1).mean(1) * weights).mean()
        return loss

    @staticmethod
    def _groups(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
        """Return two groups: every other parameter learns at half the rate, and only those
        decay.
        """
        listed = list(parameters)
        slow = {"params": listed[1::2], "lr": LEARNING_RATE / 2, "weight_decay": WEIGHT_DECAY}
        return [{"params": listed[::2]}, slow] if slow["params"] else [{"params": listed}]

    @staticmethod
    def _schedule(optimizer: torch.optim.Optimizer, step: int) -> None:
        for number, group in enumerate(optimizer.param_groups):
            group["lr"] = LEARNING_RATE / (1 + number) * RATES[step % len(RATES)]

    def optimizer(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        """Return the described optimizer; steps are small, so that weights stay positive."""
        if self._words.optimizer == "adam":
            return torch.optim.Adam(parameters, lr=LEARNING_RATE)
        momentum = 0.9 if self._words.optimizer == "momentum" else 0.0
        return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=momentum)

    def samples(self) -> GeneratedSamples:
        return GeneratedSamples(self._words.samples)


def describe(workload: str, model: nn.Module) -> ModelLayout:
    """Return the result of `describe_model` for a workload's `model`, without an optimizer step."""
    keys = STATE[parse_model_words(workload.removeprefix(PREFIX)).optimizer]
    # torch's optimizers count steps in float64 if that is the default dtype, else in float32.
    counted_in = "float64" if torch.get_default_dtype() == torch.float64 else "float32"
    parameters = [(name, _spec(name, p)) for name, p in model.named_parameters()]
    trained = [(n, spec) for (n, spec), p in zip(parameters, model.parameters(), strict=True)
               if p.requires_grad]  # fmt: skip
    return ModelLayout(
        parameters=tuple(spec for _, spec in parameters),
        buffers=tuple(_spec(name, b) for name, b in model.named_buffers()),
        optimizer=tuple(
            TensorSpec(
                name=f"{name}/{key}",
                shape=() if key == "step" else spec.shape,
                dtype=counted_in if key == "step" else spec.dtype,
            )
            for name, spec in trained
            for key in keys
        ),
    )


def _spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(name=name, shape=tuple(tensor.shape), dtype=dtype)


def described(words: str) -> Generated:
    """Return the workload `generated:WORDS`. Raises UsageError."""
    return Generated(parse_model_words(words))


workload = described("linear3.bias-scale")
