"""What is loaded: a strategy with all that it may leave out, and a workload."""

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
    """A strategy with every optional method filled in; `file` and `line` are where it was
    defined, 0 where no line is known.

    `builds` gets what builds an optimizer before `wrap`, whose code may ask for one. `backward` is
    None where one forward and backward over the whole shard will do. `begun` is called before every
    forward. `zero_grad` is called in place of the optimizer's; None where the strategy does not
    define it. `update` says where gradients are final: before the `loop` begins the optimizer's
    step; where an `optimizer` around another begins that one's; or where `sync` begins it, which
    then takes the step itself. `full` gives whole tensors by an accessor's name, where model and
    optimizer may not hold them (`recorder.Full`). `buffers` puts those of all ranks into the whole
    model, and says whether it has all; every rank calls it. An `engine` may take long to be set up.
    `clip` is None where torch's function is called. `note` says which form the code was taken as,
    where it was not written for distcheck; `handed_once` are arguments that get a generator, each
    with the `--arg` value of a list; `refusal` is what the form that was chosen first says of the
    code.
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
    def syncs(self) -> bool:
        """Whether there is a sync() to call after backward."""
        return self.sync is not _nothing

    def promising(
        self, *, note: str | None = None, declines: tuple[CellName, ...] = (), **promised: Any
    ) -> "LoadedStrategy":
        """The same, with fields of the contract and the note replaced; `declines` are added."""
        declined = tuple(dict.fromkeys((*self.contract.declines, *declines)))
        contract = msgspec.structs.replace(self.contract, declines=declined, **promised)
        return replace(self, contract=contract, note=self.note if note is None else note)


@dataclass(frozen=True, kw_only=True)
class LoadedWorkload:
    """A workload; `own_samples` and `sampler` are None where it leaves them to distcheck."""

    workload: Workload
    own_samples: Callable[[], Samples] | None
    sampler: Callable[[int, int, int, int, int], Sequence[int]] | None


def construct(spec: str, kind: type) -> Any:
    """An object of a class that needs no arguments. Raises UsageError."""
    try:
        return kind()
    except Exception as error:
        raise UsageError(
            f"{spec!r} is a class, and {kind.__name__}() raised {type(error).__name__}: {error}"
        ) from error
