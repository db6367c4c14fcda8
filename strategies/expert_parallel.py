"""Expert parallelism, by hand: each rank has some of the experts, and samples go to their expert.

The gate chooses an expert for each row. A rank looks at its share of the rows, sends each to the
rank that has its expert (one all-to-all), and gets the answers back (another). Backward sends
gradients the same ways round. Rows are sorted by expert before they are sent, so that what is for
one rank lies together.

The gate has seen this rank's rows only, so its gradient is added up over the ranks. An expert has
seen all rows that any rank sent it: its gradient is whole.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distcheck.contract import Step, strategy


class AllToAll(torch.autograd.Function):
    """Sends `out[r]` rows to rank r, and receives `into[r]` from it; backward the other way."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, out: list[int], into: list[int]) -> torch.Tensor:
        """What the others have sent."""
        ctx.sizes = out, into
        received = rows.new_empty(sum(into), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), into, out)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """The gradient of what was sent."""
        out, into = ctx.sizes
        returned = gradient.new_empty(sum(out), *gradient.shape[1:])
        dist.all_to_all_single(returned, gradient.contiguous(), out, into)
        return returned, None, None


class MyRows(torch.autograd.Function):
    """Forward: this rank's rows. Backward: the gradient of all, put together."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        """About a W-th of them."""
        ctx.sizes = [len(part) for part in rows.tensor_split(dist.get_world_size())]
        return rows.tensor_split(dist.get_world_size())[dist.get_rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """On every rank, since every rank computes what comes before."""
        return together(gradient, ctx.sizes)


class AllRows(torch.autograd.Function):
    """Forward: all ranks' rows. Backward: the gradient of this rank's."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """In their order."""
        return together(rows, sizes)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Every rank computes what comes after, so nothing is added up."""
        return gradient.tensor_split(dist.get_world_size())[dist.get_rank()].contiguous(), None


def together(rows: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Rows of all ranks; all_gather wants one size, so shorter parts are filled up."""
    padded = rows.new_zeros(max(sizes), *rows.shape[1:])
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


class ExpertParallelLayer(nn.Module):
    """This rank's experts, and the gate; [n, width] -> [n, width] on every rank."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        world, experts = dist.get_world_size(), list(layer.experts)  # type: ignore[arg-type]
        if len(experts) % world:
            raise ValueError(f"{len(experts)} experts cannot be divided by {world} ranks")
        self.number = len(experts) // world
        first = dist.get_rank() * self.number
        layer.experts = nn.ModuleList(experts[first : first + self.number])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """There and back."""
        sizes = [len(part) for part in rows.tensor_split(dist.get_world_size())]
        mine = MyRows.apply(rows)
        chosen, probability = self.layer.choose(mine)  # type: ignore[operator]
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=self.number * dist.get_world_size())
        incoming = torch.empty_like(counts)  # of each rank, the rows for each of our experts
        dist.all_to_all_single(incoming, counts)
        out = counts.view(-1, self.number).sum(1).tolist()
        into = incoming.view(-1, self.number).sum(1).tolist()
        received = AllToAll.apply(mine[order], out, into)
        whose = torch.arange(self.number).repeat(len(into)).repeat_interleave(incoming)
        answers = torch.zeros_like(received)
        for number, expert in enumerate(self.layer.experts):  # type: ignore[arg-type]
            places = (whose == number).nonzero().squeeze(1)
            answers = answers.index_add(0, places, expert(received[places]))
        returned = AllToAll.apply(answers, into, out)
        in_order = torch.zeros_like(mine).index_add(0, order, returned)
        outputs: torch.Tensor = AllRows.apply(in_order * probability.unsqueeze(1), sizes)
        return outputs


@strategy(parallel={"expert": -1}, workload="experts")
class ExpertParallel:
    """For the workload `experts`, whose number of experts the number of ranks must divide."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Replaces the layer of experts."""
        if not hasattr(model, "mixture"):
            raise ValueError("it has no layer of experts; give --workload experts")
        model.mixture = ExpertParallelLayer(model.mixture)  # type: ignore[arg-type]
        return model

    def sync(self, model: nn.Module, step: Step) -> None:
        """Adds up the gate's shares."""
        dist.all_reduce(model.mixture.layer.gate.weight.grad)  # type: ignore
