"""`distcheck backends`: from words to worlds to an exit code. Imports no torch."""

from collections.abc import Collection, Iterator, Sequence

from rich.console import Console

from distcheck import backends
from distcheck.backend_probe import patterns
from distcheck.backend_probe.document import read_baseline, render_json
from distcheck.backend_probe.operations import OPERATIONS
from distcheck.backend_probe.records import Probe, Sweep, exit_code_of
from distcheck.backend_probe.scene import FORMS
from distcheck.backend_probe.sweep import look_at, sweep
from distcheck.backend_probe.table import render, render_changes
from distcheck.errors import ExitCode, UsageError
from distcheck.errors.spelling import did_you_mean
from distcheck.records import MOST_DEADLINE_S
from distcheck.reports.files import check_writable, write_text
from distcheck.reports.live import LiveProgress
from distcheck.reports.terminal import console_for
from distcheck.training import loading
from distcheck.worlds.pool import Pool

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


_DEVICES = ("", "cpu", "cuda")


def backends_command(
    *,
    backend: tuple[str, ...],
    device: str,
    world: int,
    operations: tuple[str, ...],
    dtypes: tuple[str, ...],
    forms: tuple[str, ...],
    deadline_s: float,
    baseline_file: str | None,
    json_file: str | None,
    verbose: bool,
) -> int:
    """Probes and shows; returns the exit code."""
    probes = plan_probes(world=world, operations=operations, dtypes=dtypes, forms=forms)
    known = known_names()
    if device not in _DEVICES:
        raise UsageError(f"unknown --device {device!r}; known are cpu and cuda")
    if not 0 < deadline_s <= MOST_DEADLINE_S:
        raise UsageError(
            f"--deadline {deadline_s:g} is out of range; it takes a number of seconds above 0, "
            f"and at most {MOST_DEADLINE_S}"
        )
    for name in backend:
        loading.check_spelling("backend", name, backends.backend_names())
    baseline = read_baseline(baseline_file)
    check_writable(json_file)
    pool = Pool()
    try:
        sweeps = [
            _sweep(pool, name, probes, device=device, world=world, deadline_s=deadline_s,
                   asked=bool(backend))
            for name in dict.fromkeys(backend or known)
        ]  # fmt: skip
    finally:
        pool.close()
    code = exit_code_of(sweeps, baseline)
    if json_file != "-":
        console = console_for()
        for number, one in enumerate(sweeps):
            if number:
                console.print()
            render(one, console, verbose=verbose)
        if baseline is not None:
            render_changes(sweeps, baseline, console)
        elif code == ExitCode.MISMATCH:
            console.print()
            console.print("to fail on changes alone: --json now.json, then --baseline now.json")
    if json_file is not None:
        changes = baseline.changes(sweeps) if baseline is not None else []
        write_text(json_file, render_json(sweeps, changes, code))
    return int(code)


def known_names() -> list[str]:
    """The backends that need no module of a person's own, and move data between processes."""
    return [name for name in backends.backend_names() if name != "simulated"]


def _sweep(
    pool: Pool,
    name: str,
    probes: list[Probe],
    *,
    device: str,
    world: int,
    deadline_s: float,
    asked: bool,
) -> Sweep:
    look = look_at(pool, backend=name, device=device, world=world)
    found = Sweep(
        backend=name,
        device=look.device,
        world=world,
        missing=look.missing,
        asked=asked,
        environment=look.environment,
    )
    if look.missing:
        return found
    with LiveProgress(Console(stderr=True)) as live:
        what = f"{name} on {look.device}"
        live.counted(0, len(probes), what)
        cells, failure = sweep(
            pool,
            probes,
            backend=name,
            device=look.device,
            world=world,
            deadline_s=deadline_s,
            on_cell=lambda done: live.counted(done, len(probes), what),
        )
    return Sweep(
        backend=name,
        device=look.device,
        world=world,
        cells=tuple(cells),
        failure=failure,
        asked=asked,
        environment=look.environment,
    )
