"""Compressors with a memory, and quantizers, each wrong in one line."""

import torch
import torch.distributed as dist
from torch import nn

from distcheck.contract import Step

from . import mutant

_WRONG = "gradients rounding"


class _WithMemory:
    """The largest tenth of each gradient plus memory; the rest is remembered."""

    def __init__(self) -> None:
        self.memory: dict[str, torch.Tensor] = {}

    def sync(self, model: nn.Module, step: Step) -> None:
        for name, parameter in model.named_parameters():
            key = self.key(name, parameter)
            before = self.memory.get(key, torch.zeros_like(parameter.grad))
            total = self.total(parameter.grad, before)
            sent = self.compress(total, parameter.grad, step)
            self.memory[key] = self.rest(total, sent, step)
            dist.all_reduce(sent)
            parameter.grad.copy_(sent / self.divisor(step))

    def key(self, name: str, parameter: nn.Parameter) -> str:
        return name

    def total(self, gradient: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        return gradient + before

    def compress(self, total: torch.Tensor, gradient: torch.Tensor, step: Step) -> torch.Tensor:
        return self.only(total, self.places(total, max(1, total.numel() // 10), step))

    def places(self, total: torch.Tensor, k: int, step: Step) -> torch.Tensor:
        return total.flatten().abs().topk(k).indices

    def only(self, total: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        sent = torch.zeros_like(total)
        sent.view(-1)[places] = total.flatten()[places]
        return sent

    def rest(self, total: torch.Tensor, sent: torch.Tensor, step: Step) -> torch.Tensor:
        return total - sent

    def divisor(self, step: Step) -> float:
        return step.world_size


@mutant(caught="gradients rounding, gradients full batch float32", steps=2)
class SendsTheLargestTenth(_WithMemory):
    """Right, but not accepted."""


@mutant(caught=_WRONG, steps=2, step=1, accept="sparse:0.1")
class MemoryIsForgotten(_WithMemory):
    """Nothing is remembered."""

    def rest(self, total: torch.Tensor, sent: torch.Tensor, step: Step) -> torch.Tensor:
        return torch.zeros_like(total)


@mutant(caught=_WRONG, steps=2, step=1, accept="error-feedback", seldom=True)
class MemoryIsForgottenByAnUnnamedCompressor(MemoryIsForgotten):
    """The compressor is the one of the first step."""


@mutant(caught=_WRONG, steps=2, step=1, accept="sparse:0.1", seldom=True)
class MemoryIsAddedTwice(_WithMemory):
    """Before and after something else."""

    def total(self, gradient: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        return gradient + before + before


@mutant(caught=_WRONG, steps=3, step=2, accept="sparse:0.1", seldom=True)
class MemoryIsReset(_WithMemory):
    """After every second step."""

    def rest(self, total: torch.Tensor, sent: torch.Tensor, step: Step) -> torch.Tensor:
        return (total - sent) * (step.index % 2 == 0)


@mutant(caught=_WRONG, steps=2, step=1, accept="sparse:0.1", seldom=True)
class MemoryIsThatOfTheMean(_WithMemory):
    """What all ranks have left, divided by their number, on every rank."""

    def rest(self, total: torch.Tensor, sent: torch.Tensor, step: Step) -> torch.Tensor:
        left = total - sent
        dist.all_reduce(left)
        return left / step.world_size


@mutant(caught=_WRONG, steps=2, step=1, accept="sparse:0.1", seldom=True)
class MemoryKeepsWhatIsSent(_WithMemory):
    """What is sent is not taken out."""

    def rest(self, total: torch.Tensor, sent: torch.Tensor, step: Step) -> torch.Tensor:
        return total.clone()


@mutant(caught=_WRONG, steps=2, step=1, accept="sparse:0.1", seldom=True)
class MemoryIsAddedAfterCompression(_WithMemory):
    """The places are those of the gradient."""

    def compress(self, total: torch.Tensor, gradient: torch.Tensor, step: Step) -> torch.Tensor:
        places = self.places(gradient, max(1, total.numel() // 10), step)
        return self.only(total, places)


@mutant(caught=_WRONG, steps=2, accept="sparse:0.1")
class OneElementMore(_WithMemory):
    """The K-th is sent, and one after it."""

    def places(self, total: torch.Tensor, k: int, step: Step) -> torch.Tensor:
        return super().places(total, k + 1, step)


@mutant(caught=_WRONG, steps=2, accept="sparse:0.1", seldom=True)
class LargestBySign(_WithMemory):
    """Negative elements are never the largest."""

    def places(self, total: torch.Tensor, k: int, step: Step) -> torch.Tensor:
        return total.flatten().topk(k).indices


@mutant(caught=_WRONG, steps=2, accept="sparse:0.1", seldom=True)
class SparseAndNeverDivided(_WithMemory):
    """A sum."""

    def divisor(self, step: Step) -> float:
        return 1.0


class _RandomPlaces(_WithMemory):
    """The values at places that all ranks draw, without the places."""

    def compress(self, total: torch.Tensor, gradient: torch.Tensor, step: Step) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed(step))
        order = torch.randperm(total.numel(), generator=generator)
        places = order[: max(1, total.numel() // 10)]
        values = total.flatten()[places]
        dist.all_reduce(values)
        sent = torch.zeros_like(total)
        sent.view(-1)[places] = values
        self.kept = self.only(total, places)
        return sent / step.world_size

    def rest(self, total: torch.Tensor, sent: torch.Tensor, step: Step) -> torch.Tensor:
        return total - self.kept

    def seed(self, step: Step) -> int:
        return step.index


@mutant(caught="gradients rounding", steps=2, accept="sparse:0.1:random")
class OwnSeeds(_RandomPlaces):
    """Each rank draws its own places, and values of different ones are added up."""

    def seed(self, step: Step) -> int:
        return step.index + 100 * step.rank


class _Signs(_WithMemory):
    """Signs, times their mean magnitude."""

    def compress(self, total: torch.Tensor, gradient: torch.Tensor, step: Step) -> torch.Tensor:
        return self.scale(total) * total.sign()

    def scale(self, total: torch.Tensor) -> torch.Tensor:
        return total.abs().mean()


@mutant(caught="gradients rounding, gradients full batch float32", steps=2, seldom=True)
class SendsScaledSigns(_Signs):
    """Right, but not accepted."""


@mutant(caught=_WRONG, steps=2, step=1, accept="error-feedback:sign", seldom=True)
class SignsWithoutMemory(_Signs):
    """The rest is dropped."""

    def rest(self, total: torch.Tensor, sent: torch.Tensor, step: Step) -> torch.Tensor:
        return torch.zeros_like(total)


@mutant(caught=_WRONG, steps=2, step=1, accept="error-feedback:sign", seldom=True)
class SignsTakenOutUnscaled(_Signs):
    """The memory loses signs, and the scaled ones are sent."""

    def rest(self, total: torch.Tensor, sent: torch.Tensor, step: Step) -> torch.Tensor:
        return total - sent.sign()


@mutant(caught=_WRONG, steps=2, step=1, accept="error-feedback:sign", seldom=True)
class SignsAddedToTheMemory(_Signs):
    """Plus in place of minus."""

    def rest(self, total: torch.Tensor, sent: torch.Tensor, step: Step) -> torch.Tensor:
        return total + sent


@mutant(caught=_WRONG, steps=2, accept="error-feedback:sign", seldom=True)
class SignsTimesTheMaximum(_Signs):
    """Too large for a contraction."""

    def scale(self, total: torch.Tensor) -> torch.Tensor:
        return total.abs().max()


class _Grid(_WithMemory):
    """Integers of four bits, from -7 to 7."""

    levels = 7

    def compress(self, total: torch.Tensor, gradient: torch.Tensor, step: Step) -> torch.Tensor:
        quantum = total.abs().max() / self.levels
        return (total / quantum).round() * quantum


@mutant(
    caught=_WRONG, steps=4, step=2, accept="error-feedback:quantized=4", seldom=True,
    workload="mlp:small", world=2,
)  # fmt: skip
class GridWithoutMemory(_Grid):
    """The rest is dropped."""

    def rest(self, total: torch.Tensor, sent: torch.Tensor, step: Step) -> torch.Tensor:
        return torch.zeros_like(total)


@mutant(
    caught=_WRONG, steps=4, step=2, accept="error-feedback:quantized=4", seldom=True,
    workload="mlp:small", world=2,
)  # fmt: skip
class GridWithTheMemoryTwice(_Grid):
    """Added before and after."""

    def total(self, gradient: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        return gradient + 2 * before


class _Stochastic:
    """Integers of eight bits, rounded at random; one grid per block of 64 elements."""

    block = 64

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def sync(self, model: nn.Module, step: Step) -> None:
        self.generator.manual_seed(100 * step.index + step.rank)
        for parameter in model.parameters():
            flat = parameter.grad.flatten()
            rows = nn.functional.pad(flat, (0, -len(flat) % self.block)).reshape(-1, self.block)
            quanta = rows.abs().amax(1, keepdim=True) / 127
            levels = self.rounded((rows / quanta).nan_to_num())
            sent = (levels * quanta).flatten()[: len(flat)]
            dist.all_reduce(sent)
            parameter.grad.copy_(sent.view_as(parameter.grad) / step.world_size)

    def rounded(self, numbers: torch.Tensor) -> torch.Tensor:
        return (numbers + torch.rand(numbers.shape, generator=self.generator)).floor()


@mutant(
    caught=_WRONG, steps=1, accept="quantized:8:block=64:stochastic",
    workload="mlp:small", world=2,
)  # fmt: skip
class RoundsToTheNearest(_Stochastic):
    """Every draw is 1/2."""

    def rounded(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.round()


@mutant(
    caught=_WRONG, steps=1, accept="quantized:8:block=64:stochastic", seldom=True,
    workload="mlp:small", world=2,
)  # fmt: skip
class RoundsDown(_Stochastic):
    """Nothing is drawn."""

    def rounded(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.floor()


@mutant(
    caught=_WRONG, steps=1, accept="quantized:8:block=64:stochastic", seldom=True,
    workload="mlp:small", world=2,
)  # fmt: skip
class DrawsFromHalfTheRange(_Stochastic):
    """Rounds up too seldom."""

    def rounded(self, numbers: torch.Tensor) -> torch.Tensor:
        return (numbers + torch.rand(numbers.shape, generator=self.generator) / 2).floor()
