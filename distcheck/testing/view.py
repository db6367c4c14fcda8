"""The value of the fixture `world` in a rank."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


class WorldView:
    """One rank's view of the world that it runs in.

    rank, size   this rank's number, and the world size
    device       the device for this rank's tensors
    group        the process group of all ranks: torch's default group
    seed         the root seed; torch, random and numpy start from it, identically on every rank
    """

    def __init__(
        self, *, rank: int, size: int, device: "torch.device", group: "ProcessGroup", seed: int
    ) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.group, self.seed = group, seed

    def barrier(self) -> None:
        import torch.distributed as dist

        dist.barrier(self.group)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's `value`, in rank order, on every rank. Values are pickled."""
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, self.group)
        return values

    def __repr__(self) -> str:
        return f"<rank {self.rank} of {self.size} on {self.device}>"
