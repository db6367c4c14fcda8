"""A loaded strategy with all optional methods filled in, and a loaded workload."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from distcheck.contract import Batch, Build, CellName, Contract, LossOf, Samples, Step, Workload
from distcheck.errors import UsageError

if TYPE_CHECKING:
    import torch


def _nothing(model: "torch.nn.Module", step: Step) -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class LoadedStrategy:
    """A strategy with every optional method filled in.

    file, line   location of its definition; line 0: unknown
    builds       receives the function that builds an optimizer, before `wrap`, whose code may need
                 one
    backward     None for one forward and backward over the whole shard
    begun        called before every forward
    zero_grad    replaces the optimizer's; None if the strategy does not define it
    update       place where gradients are final: before the `loop` begins the optimizer's step;
                 where an `optimizer` around another begins the inner step; or where `sync` begins
                 it, which then takes the step itself
    full         returns unsharded tensors by accessor name, if model and optimizer may not hold
                 them (`recorder.Full`)
    buffers      gathers the buffers of all ranks into the full model; returns True if the model
                 then has all; a collective
    engine       True if it may take long to set up
    clip         None for torch's function
    note         form that was selected for code not written for distcheck
    handed_once  arguments that receive a generator, each with the `--arg` value for a list
    refusal      error of the form that was selected first
    """

    contract: Contract
    file: str
    line: int = 0
    builds: "Callable[[Build], None]" = lambda build: None
    wrap: "Callable[[torch.nn.Module], torch.nn.Module]" = lambda model: model
    scale_loss: "Callable[[torch.Tensor, Step], torch.Tensor]" = lambda loss, step: loss
    sync: "Callable[[torch.nn.Module, Step], None]" = _nothing
    begun: "Callable[[torch.nn.Module, Step], None]" = _nothing
    zero_grad: "Callable[[torch.nn.Module, Step], None] | None" = None
    clip: "Callable[[torch.nn.Module, float], None] | None" = None
    close: Callable[[], None] = lambda: None
    optimizer: "Callable[[Build, Iterable[torch.nn.Parameter]], torch.optim.Optimizer]" = (
        lambda build, parameters: build(parameters)
    )
    backward: "Callable[[LossOf, Batch, Step], torch.Tensor | None] | None" = None
    full: "Callable[[str], Any] | None" = None
    buffers: Callable[[], bool] = lambda: True
    engine: bool = False
    update: Literal["loop", "optimizer", "sync"] = "loop"
    note: str = ""
    handed_once: tuple[tuple[str, str], ...] = ()
    refusal: str = ""

    @property
    def has_sync(self) -> bool:
        """Return True if sync() must be called after backward."""
        return self.sync is not _nothing

    def with_contract(
        self, *, note: str | None = None, declines: tuple[CellName, ...] = (), **promised: Any
    ) -> "LoadedStrategy":
        """Return the strategy with contract fields and note replaced, and `declines` added."""
        declined = tuple(dict.fromkeys((*self.contract.declines, *declines)))
        contract = msgspec.structs.replace(self.contract, declines=declined, **promised)
        return replace(self, contract=contract, note=self.note if note is None else note)


@dataclass(frozen=True, kw_only=True)
class LoadedWorkload:
    """A workload. `own_samples` and `sampler` are None if it uses those of distcheck."""

    workload: Workload
    own_samples: Callable[[], Samples] | None
    sampler: Callable[[int, int, int, int, int], Sequence[int]] | None


def construct_object(spec: str, kind: type) -> Any:
    """Create an object of a class without required arguments. Raises UsageError."""
    try:
        return kind()
    except Exception as error:
        raise UsageError(
            f"{spec!r} is a class, and {kind.__name__}() raised {type(error).__name__}: {error}"
        ) from error
