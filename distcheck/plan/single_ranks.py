"""Single ranks: one may be late or have no data, and one alone shows nothing. No torch."""

from collections.abc import Sequence

from distcheck.contract import Contract
from distcheck.errors import UsageError
from distcheck.machine import devices
from distcheck.records import Case, Delay
from distcheck.records.generated_words import PREFIX
from distcheck.workloads.cells import CELLS

_MOST_DELAY = 10_000  # milliseconds


def check_delays(delays: Sequence[Delay], world: int) -> None:
    """Raises UsageError for a delay that no rank of this world could have."""
    for delay in delays:
        if not (0 <= delay.rank < world and delay.collective >= 0 and 0 < delay.ms <= _MOST_DELAY):
            raise UsageError(
                f"a delay of rank {delay.rank} before collective {delay.collective} by {delay.ms} "
                f"ms is out of range for a world of {world}: ranks count from 0, collectives "
                f"from 0 (before backward), and milliseconds from 1 to {_MOST_DELAY}"
            )


def check_without_data(
    without: Sequence[int],
    *,
    worlds: Sequence[int],
    workloads: Sequence[str],
    thorough: bool,
    accept: str | None,
) -> None:
    """Raises UsageError where ranks without data make no sense, or no bound is derived for them."""
    if not without:
        return
    for world in worlds:
        beyond = [rank for rank in without if not 0 <= rank < world]
        if beyond or len(without) >= world:
            raise UsageError(
                f"--without-data {beyond[0]} is out of range for --world {world}; ranks are 0 to "
                f"{world - 1}"
                if beyond
                else f"--without-data leaves no rank of --world {world} a shard; give more ranks"
            )
    in_cells = [name for name in workloads if name in CELLS]
    if thorough or in_cells:
        raise UsageError(
            f"--without-data does not go with {in_cells[0] if in_cells else '--thorough'}, "
            "because in a cell every rank computes; give another workload"
        )
    if accept is not None:
        raise UsageError(
            f"--without-data does not go with --accept {accept}, because its bounds assume a "
            "gradient from every rank; remove one of the two"
        )


def exchanges_nothing(case: Case, contract: Contract) -> bool:
    """Whether the world has one rank alone, so that a missing exchange would not show.

    Not where that rank drives several GPUs, nor in a search: there a case may shrink to a world of
    one rank, and other cases show what this one does not.
    """
    over_gpus = contract.device == "cuda" and devices.gpu_count() > 1
    return case.world == 1 and not over_gpus and not case.workload.startswith(PREFIX)
