"""A parameter server over torch.distributed.rpc: rank 0 serves, and trains like every other rank.

Ranks push their gradients to the server and wait. It answers all of them once the last one has
come, with the mean, added up in the order of the ranks and not of their arrival.
"""

import threading
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d, rpc
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import register_rendezvous_handler

from distcheck.contract import RankOrder, Step, strategy

_TIMEOUT_S = 3600.0  # the caller watches for hangs; a slow machine is not one


class _Server:
    """What rank 0 keeps of the step that is under way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._pushed: dict[int, list[torch.Tensor]] = {}
        self._means: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()

    def push(
        self, rank: int, world: int, gradients: list[torch.Tensor]
    ) -> torch.futures.Future[list[torch.Tensor]]:
        """Takes one rank's gradients; the future is done when all have come."""
        with self._lock:
            self._pushed[rank] = gradients
            means, pushed = self._means, self._pushed
            if len(pushed) < world:
                return means
            self._begin()
        totals = [gradient.clone() for gradient in pushed[0]]
        for other in range(1, world):
            for total, gradient in zip(totals, pushed[other], strict=True):
                total += gradient
        means.set_result([total / world for total in totals])
        return means


_server = _Server()


@rpc.functions.async_execution  # type: ignore[untyped-decorator]  # answers when the future is done, and blocks no thread till then
def _push(
    rank: int, world: int, gradients: list[torch.Tensor]
) -> torch.futures.Future[list[torch.Tensor]]:
    """Runs on rank 0, whichever rank calls it."""
    return _server.push(rank, world, gradients)


def _meet(url: str, **_: object) -> Iterator[tuple[Store, int, int]]:
    """Ranks that have a process group have met already: over its store, and no port is chosen."""
    store = PrefixStore("parameter server", distributed_c10d._get_default_store())
    yield store, dist.get_rank(), dist.get_world_size()


# TensorPipe moves GPU tensors only between devices that were named to it.
# And rpc starts once in a process. The lists that ranks push have to be of the same gradients.
@strategy(
    order=RankOrder(), scale="divide-after", device="cpu", declines=("resume", "absent_on_some")
)
class ParameterServer:
    """Push, wait, and take the mean."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Opens the connections; the model stays as it is."""
        register_rendezvous_handler("process-group", _meet)
        rpc.init_rpc(
            f"rank{dist.get_rank()}",
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
                init_method="process-group://", rpc_timeout=_TIMEOUT_S
            ),
        )
        return model

    def sync(self, model: nn.Module, step: Step) -> None:
        """Leaves the mean gradient over all samples of the step in every `parameter.grad`."""
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if step.weight != 1.0:  # unequal shards: weight each by its number of samples
            for gradient in gradients:
                gradient.mul_(step.weight)
        means = rpc.rpc_sync("rank0", _push, args=(step.rank, step.world_size, gradients))
        for gradient, mean in zip(gradients, means, strict=True):
            gradient.copy_(mean)

    def close(self) -> None:
        """Waits until no rank calls any more, and closes the connections."""
        rpc.shutdown()
