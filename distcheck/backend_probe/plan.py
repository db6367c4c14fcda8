"""Which cells are probed: operations x reductions x forms x dtypes, where they mean something."""

from collections.abc import Collection, Iterator, Sequence

from distcheck.backend_probe import patterns
from distcheck.backend_probe.operations import OPERATIONS
from distcheck.backend_probe.records import Probe
from distcheck.backend_probe.scene import FORMS
from distcheck.errors import UsageError
from distcheck.errors.spelling import did_you_mean

_LARGE_DTYPES = ("float32", "bfloat16", "int64")  # 4, 2 and 8 bytes; the others are as long
_LEAST_RANKS = 2
_SUB_GROUP_LEAST_RANKS = 3  # a group of all ranks but the first, with at least two in it


def plan_probes(
    *, world: int, operations: Sequence[str], dtypes: Sequence[str], forms: Sequence[str]
) -> list[Probe]:
    """The cells in the order of the table; an empty selection means everything.

    A cell's salt does not depend on what else was asked for. What `mixed` shows depends on whether
    `transposed` is refused, so that is probed with it. Raises UsageError.
    """
    if not _LEAST_RANKS <= world <= patterns.MOST_RANKS:
        raise UsageError(
            f"--world {world} is out of range; backends are probed with {_LEAST_RANKS} to "
            f"{patterns.MOST_RANKS} ranks, because larger sums are not exact in uint8 and bfloat16"
        )
    _check("--op", operations, OPERATIONS)
    _check("--dtype", dtypes, patterns.DTYPES)
    _check("--form", forms, FORMS)
    if "mixed" in forms:
        forms = (*forms, "transposed")
    probes = [
        probe
        for probe in _everything()
        if (not operations or probe.operation in operations)
        and (not dtypes or probe.dtype in (*dtypes, ""))
        and (not forms or probe.form in forms)
        and (probe.form != "sub-group" or world >= _SUB_GROUP_LEAST_RANKS)
    ]
    if not probes:
        raise UsageError(
            "--op, --dtype, --form and --world together select nothing; sub-group needs --world "
            f"{_SUB_GROUP_LEAST_RANKS}, and point-to-point has no async form"
        )
    return probes


def _everything() -> Iterator[Probe]:
    salt = 0
    for operation in OPERATIONS.values():
        for reduction in patterns.REDUCTIONS if operation.reduces else ("",):
            for form in operation.forms:
                for dtype in operation.dtypes:
                    if reduction and not patterns.is_meaningful(reduction, dtype):
                        continue
                    if form == "large" and dtype not in _LARGE_DTYPES:
                        continue
                    salt += 1
                    yield Probe(
                        operation=operation.name,
                        reduction=reduction,
                        form=form,
                        dtype=dtype,
                        salt=salt,
                    )


def _check(option: str, given: Sequence[str], known: Collection[str]) -> None:
    for name in given:
        if name not in known:
            raise UsageError(
                f"unknown {option} {name!r}{did_you_mean(name, known)}; known are "
                f"{', '.join(known)}"
            )
