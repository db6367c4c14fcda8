"""What a layout divides beside its layers: classes, tokens, random masks, the norm of a clip.

Each has a right class as well, whose name begins with `Right`; tests/world/test_layouts.py runs it.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from distcheck_strategies.column_parallel import SideBySide
from distcheck_strategies.context_parallel import ContextParallel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from distcheck.contract import Batch, LossOf, Step, strategy

from . import mutant
from .small import POSITIONS, counted, targets, token_rows
from .tensors import _divided, _Same, _Sum


class _Piece(nn.Module):
    """Rows of a linear layer's weight, or columns of it; what enters and leaves is the strategy's.

    Rows with a bias are some of the outputs; columns give a term of every output.
    """

    def __init__(self, linear: nn.Linear, dim: int) -> None:
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        self.weight = nn.Parameter(linear.weight.detach().chunk(world, dim=dim)[rank].clone())
        bias = linear.bias.detach()
        self.bias = nn.Parameter((bias if dim else bias.chunk(world)[rank]).clone())
        self.dim = dim

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.dim:
            return _Sum.apply(F.linear(inputs, self.weight), False) + self.bias
        return F.linear(_Same.apply(inputs), self.weight, self.bias)


@strategy(parallel={"tensor": -1})
class RightVocabulary:
    """Each rank has the logits of some of the classes, and no rank ever those of all."""

    sums_up = True

    def wrap(self, model: nn.Module) -> nn.Module:
        model[2] = _Piece(model[2], 0)
        self.model = model
        return model

    def backward(self, loss_of: LossOf, batch: Batch, step: Step) -> torch.Tensor:
        logits = self.model(batch.inputs)
        most = logits.detach().amax(1)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        total = (logits - most.unsqueeze(1)).exp().sum(1)
        if self.sums_up:
            total = _Sum.apply(total, False)
        held = batch.labels - step.rank * logits.shape[1]
        here = (held >= 0) & (held < logits.shape[1])
        own = logits.gather(1, held.clamp(0, logits.shape[1] - 1).unsqueeze(1)).squeeze(1)
        label = _Sum.apply(torch.where(here, own, 0.0), False)
        loss = (total.log() + most - label).mean()
        loss.backward()
        return loss.detach()


@mutant(
    caught="gradients full batch float32, loss full batch float32", world=2, steps=1, seldom=True
)
@strategy(parallel={"tensor": -1})
class NormalizesOverItsOwnClasses(RightVocabulary):
    """The sum of the softmax is over the classes of one rank."""

    sums_up = False


@mutant(caught="outputs full batch float32", world=2, steps=1)
@strategy(parallel={"tensor": -1})
class ReturnsLogitsWithoutTheirMaximum:
    """For a softmax that cannot overflow, the largest logit is taken out of the logits in place."""

    def wrap(self, model: nn.Module) -> nn.Module:
        model[2] = _Piece(model[2], 0)
        model.register_forward_hook(self.whole)
        return model

    def whole(self, model: nn.Module, given: Any, own: torch.Tensor) -> torch.Tensor:
        logits = SideBySide.apply(own)
        return logits - logits.detach().amax(1, keepdim=True)


@strategy(parallel={"sequence": -1})
class RightTokens:
    """Each rank has some positions of every sample, and the loss is a mean over what counts."""

    def wrap(self, model: nn.Module) -> nn.Module:
        self.model = model
        return model

    def backward(self, loss_of: LossOf, batch: Batch, step: Step) -> torch.Tensor:
        mine = slice(
            step.rank * POSITIONS // step.world_size, (step.rank + 1) * POSITIONS // step.world_size
        )
        counts = counted(batch)[:, mine]
        outputs = self.model(token_rows(batch)[:, mine])[counts]
        own = F.cross_entropy(outputs, targets(batch)[:, mine][counts], reduction="sum")
        loss = own / self.divisor(counts)
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total

    def divisor(self, counts: torch.Tensor) -> torch.Tensor:
        """The tokens of all ranks that count."""
        total = counts.sum()
        dist.all_reduce(total)
        return total

    def sync(self, model: nn.Module, step: Step) -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)


@mutant(
    caught="gradients full batch float32, loss full batch float32", world=2,
    workload=".small:ManyLengths", steps=1, seldom=True,
)  # fmt: skip
@strategy(parallel={"sequence": -1})
class MeanOfTheRanksMeans(RightTokens):
    """Each rank's mean over its own tokens counts alike, however few of them count."""

    def divisor(self, counts: torch.Tensor) -> torch.Tensor:
        return counts.sum() * dist.get_world_size()


@mutant(caught="gradients full batch float32", world=2, workload=".small:ManyLengths", seldom=True)
@strategy(parallel={"sequence": -1})
class AveragesOverContext(RightTokens):
    """Gradients of the ranks that share a sample are averaged, as those of other samples are."""

    def sync(self, model: nn.Module, step: Step) -> None:
        super().sync(model, step)
        for parameter in model.parameters():
            parameter.grad /= step.world_size


class _WithoutItsShare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.contiguous().clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@mutant(caught="gradients full batch float32", world=2, workload="transformer", seldom=True)
@strategy(parallel={"sequence": -1})
class ContextCountsFully(ContextParallel):
    """The mean over the ranks' tokens passes its whole gradient on to each of them."""

    mean = _WithoutItsShare


@strategy(parallel={"tensor": -1})
class RightMasks:
    """A mask for units that are divided, where ranks must differ, and one where they must not."""

    differs, alike = True, True

    def wrap(self, model: nn.Module) -> nn.Module:
        model[0], model[3] = _Piece(model[0], 0), _Piece(model[3], 1)
        rank = dist.get_rank()
        model[2].first_unit = rank * len(model[0].bias) if self.differs else 0
        model[5].first_unit = 0 if self.alike else 64 * rank
        return model


@mutant(
    caught="gradients full batch float32, loss full batch float32, outputs full batch float32",
    world=2, workload=".small:Dropping", steps=1, seldom=True,
)  # fmt: skip
@strategy(parallel={"tensor": -1})
class MasksAlike(RightMasks):
    """Every rank drops the same of its units, which are other ones."""

    differs = False


@mutant(
    caught=(
        "gradients full batch float32, loss full batch float32, outputs full batch float32, "
        "agreement"
    ),
    world=2,
    workload=".small:Dropping",
    steps=1,
    seldom=True,
)
@strategy(parallel={"tensor": -1})
class MasksOfItsOwn(RightMasks):
    """Ranks that hold the same units drop different ones of them."""

    alike = False


@strategy(parallel={"tensor": -1})
class RightNorm:
    """Squares of pieces are added up over the ranks; what every rank holds counts once."""

    replicas = 1.0

    def wrap(self, model: nn.Module) -> nn.Module:
        return _divided(model, init_device_mesh("cpu", (dist.get_world_size(),)))

    def clip(self, model: nn.Module, max_norm: float) -> None:
        square = torch.zeros(())
        for parameter in model.parameters():
            gradient, cut = parameter.grad, False
            if isinstance(gradient, DTensor):
                cut = any(placement.is_shard() for placement in gradient.placements)
                gradient = gradient.to_local()
            share = 1.0 if cut else self.replicas / dist.get_world_size()
            square += share * gradient.square().sum()
        dist.all_reduce(square)
        factor = (max_norm / (square.sqrt() + 1e-6)).clamp(max=1.0)
        for parameter in model.parameters():
            parameter.grad.mul_(factor)


@mutant(caught="parameters bitwise", world=4, workload=".small:ClippedByTheLoop")
@strategy(parallel={"tensor": -1})
class CountsEveryReplica(RightNorm):
    """What every rank holds counts once for each of them."""

    replicas = 4.0


RIGHT = {
    "RightVocabulary": "Small", "RightTokens": "ManyLengths", "RightMasks": "Dropping",
    "RightNorm": "ClippedByTheLoop",
}  # fmt: skip
