"""Plans the cases of a request, and the checks of a case. Does not import torch.

A case is plain data and determines everything that its ranks do. `check_case` plans a stored case
again and rejects a case that no request can produce.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import cast

import msgspec

from distcheck import backends
from distcheck.contract import Contract
from distcheck.errors import CannotRunError, UsageError, did_you_mean
from distcheck.judge import acceptance
from distcheck.judge.oracles import integers
from distcheck.machine import devices
from distcheck.plan import scheduled
from distcheck.plan.case_remarks import rounding_depends_on_position, why_no_full_batch
from distcheck.plan.cells_to_run import (
    ALWAYS,
    cells_to_run,
    with_declared_workload,
    workloads_testing_promises,
)
from distcheck.plan.coverage import Coverage
from distcheck.plan.settings import DTYPES, Request
from distcheck.records import EXACT_DTYPES, MOST_DEADLINE_S, Case, Delay, LossName, PlannedCheck
from distcheck.records import layers as known_layers
from distcheck.records.case import as_file_name, is_file_name, with_unique_ids
from distcheck.records.generated_words import PREFIX
from distcheck.records.layers import BITWISE, FULL_BATCH_LAYERS, IN_FLOAT32, IN_FLOAT64, ROUNDING
from distcheck.training import loading
from distcheck.training.adapters.forms import trained_with
from distcheck.training.adapters.options import check_adaptation, check_workloads
from distcheck.training.jobs import CaseFacts
from distcheck.workloads import DEFAULT_RUN, STEPS_IN_FLOAT64, cells, datasets, facts_about
from distcheck.workloads.cells import CELLS

_MOST_DELAY = 10_000  # milliseconds
# Fields that a case copies from its request; and those that it derives from the request.
_AS_ASKED = (
    "backend", "device", "data_dir", "seed", "deadline_s", "adaptation", "delays", "separate",
    "schedule",
)  # fmt: skip
_OF_A_CASE = ("dtype", "batch", "steps", "loss", "accept", "schedules", "preemptions")


def check_delays(delays: Sequence[Delay], world: int) -> None:
    """Raise UsageError for a delay that is out of range for this world."""
    for delay in delays:
        if not (0 <= delay.rank < world and delay.collective >= 0 and 0 < delay.ms <= _MOST_DELAY):
            raise UsageError(
                f"a delay of rank {delay.rank} before collective {delay.collective} by {delay.ms} "
                f"ms is out of range for a world of {world}: ranks count from 0, collectives "
                f"from 0 (before backward), and milliseconds from 1 to {_MOST_DELAY}"
            )


def _check_without_data(request: Request) -> None:
    """Raise UsageError if ranks without data are impossible, or if no bound is derived for them."""
    without, accept = request.adaptation.without_data, request.accept
    if not without:
        return
    for world in request.worlds:
        beyond = [rank for rank in without if not 0 <= rank < world]
        if beyond or len(without) >= world:
            raise UsageError(
                f"--without-data {beyond[0]} is out of range for --world {world}; ranks are 0 to "
                f"{world - 1}"
                if beyond
                else f"--without-data leaves no rank of --world {world} with a shard; pass more "
                "ranks"
            )
    in_cells = [name for name in request.workloads if name in CELLS]
    if request.thorough or in_cells:
        raise UsageError(
            "--without-data cannot be combined with "
            f"{in_cells[0] if in_cells else '--thorough'}, because in a cell every rank "
            "computes; pass a different --workload"
        )
    if accept is not None:
        raise UsageError(
            f"--without-data cannot be combined with --accept {accept}, because its bounds "
            "assume a "
            "gradient from every rank; remove one of the two"
        )


def has_nothing_to_synchronize(case: Case, contract: Contract) -> bool:
    """Return True if the world has only one rank, so that a missing all-reduce would not show.

    Return False if that rank drives several GPUs. Also return False in a search, which may shrink a
    failing case to one rank and runs cases with more ranks.
    """
    over_gpus = contract.device == "cuda" and devices.gpu_count() > 1
    return case.world == 1 and not over_gpus and not case.workload.startswith(PREFIX)


# Prefix of a note: the declared order could not be relied on.
FALLS_BACK = "bitwise falls back to rounding: "
_MOST_BATCH = 10**7
_MOST_STEPS = 10**5


def check_request(request: Request) -> None:
    """Raise UsageError or CannotRunError for errors that can be found without torch."""
    if not request.strategies:
        known = ", ".join(sorted(loading.strategy_names()))
        raise UsageError(
            "no strategy was given; pass --strategy path/to/file.py:object or --strategy NAME, or "
            f"write a matrix under [tool.distcheck] in pyproject.toml; NAME is one of {known}"
        )
    for spec in request.strategies:
        loading.check_spelling("strategy", spec, loading.strategy_names())
        loading.check_single(spec)
    check_adaptation(request.adaptation, request.loss)
    check_workloads(request.adaptation, request.workloads)
    for spec in request.workloads:
        check_workload(spec)
    asked_for = request.workloads or ALWAYS
    acceptance.check_acceptance(
        request.accept,
        dtype=request.dtype,
        steps=min(steps_of(request, workload) for workload in asked_for),
        workloads=request.workloads,
    )
    cells.check_names(request.without)
    datasets.check_dataset(request.data)
    _check_numbers(request)
    _check_without_data(request)
    if request.dtype is not None and request.dtype not in DTYPES:
        meant = did_you_mean(request.dtype, DTYPES)
        raise UsageError(f"unknown dtype {request.dtype!r}{meant}; known are {', '.join(DTYPES)}")
    if request.dtype not in (None, *EXACT_DTYPES) and "exact" in request.workloads:
        raise UsageError(
            f"workload exact does not run in {request.dtype}, which cannot represent integer "
            f"sums over a batch exactly; pass --dtype {' or '.join(EXACT_DTYPES)}, or a "
            "different --workload"
        )
    backends.check_name(request.backend)
    scheduled.check_schedule_options(request)
    if request.device not in devices.DEVICES:
        meant = did_you_mean(request.device, devices.DEVICES)
        raise UsageError(
            f"unknown device {request.device!r}{meant}; known are {' and '.join(devices.DEVICES)}"
        )
    if why := backends.missing(request.backend):
        raise CannotRunError(why)
    if backends.name_of(request.backend) == "simulated" and request.ranks_here is not None:
        raise CannotRunError(
            f"backend {request.backend} runs all ranks in one process; start distcheck without a "
            "launcher"
        )
    if why := devices.why_device_unavailable(request.device, request.backend):
        raise CannotRunError(why)


def check_workload(spec: str) -> None:
    loading.check_spelling("workload", cells.class_of_cell(spec), loading.workload_names())


def steps_of(request: Request, workload: str) -> int:
    """Return the requested number of steps, or the workload's default."""
    if request.steps is not None:
        return request.steps
    if workload in CELLS:
        return CELLS[workload].steps
    fewer = DEFAULT_RUN[workload].steps if workload in DEFAULT_RUN else None
    return facts_about(workload).steps if request.workloads or fewer is None else fewer


def _check_numbers(request: Request) -> None:
    for what, value, least, most in (
        ("--batch", request.batch, 1, _MOST_BATCH),
        ("--steps", 1 if request.steps is None else request.steps, 1, _MOST_STEPS),
        ("--seed", request.seed, 0, 2**63 - 1),
    ):
        if not least <= value <= most:
            raise UsageError(f"{what} {value} is out of range; it takes {least} to {most}")
    if not 0 < request.deadline_s <= MOST_DEADLINE_S:
        raise UsageError(
            f"--deadline {request.deadline_s} is out of range; it takes a number of seconds "
            f"above 0, and at most {MOST_DEADLINE_S}"
        )
    if not request.worlds:
        raise UsageError("no world size was given; pass at least one number of ranks")
    for world in request.worlds:
        check_delays(request.delays, max(world, 1))
        if world < 1:
            raise UsageError(f"--world {world} is out of range; a world has at least 1 rank")
        shards = world - len(request.adaptation.without_data)
        if request.batch < shards:
            ranks = f"--world {world}" if shards == world else f"the {shards} ranks with data"
            raise UsageError(
                f"--batch {request.batch} is smaller than {ranks}, so a rank would have no "
                f"sample; pass --batch {shards} or more, or fewer ranks"
            )


def check_case(case: Case) -> Case:
    """Return the case if it can run. Raises UsageError if it was edited."""
    request = Request(
        strategies=(case.strategy,),
        worlds=(case.world,),
        workloads=(case.workload,),
        data=datasets.SYNTHETIC if case.data == "exact" else case.data,
        **{name: getattr(case, name) for name in (*_AS_ASKED, *_OF_A_CASE)},
    )
    alike = [c for c in plan_cases(request) if c.reference_device == case.reference_device]
    if not alike:
        raise UsageError(
            f"reference_device {case.reference_device!r} cannot be combined with device "
            f"{case.device!r}"
        )
    planned = alike[0]
    allowed = {planned.layers, (IN_FLOAT64,)} if case.dtype == "float64" else {planned.layers}
    if case.layers not in allowed:
        raise UsageError(
            f"comparisons {list(case.layers)} do not match {case.workload} in {case.dtype}, "
            "which has "
            f"{list(planned.layers)}"
        )
    if (planned.dtype, planned.data) != (case.dtype, case.data):
        raise UsageError(f"{case.workload} does not run in {case.dtype} on {case.data}")
    if not is_file_name(case.id):
        raise UsageError(f"id {case.id!r} cannot be the name of a file")
    return case


def plan_cases(request: Request) -> list[Case]:
    check_request(request)
    cases = [
        case
        for strategy in dict.fromkeys(request.strategies)
        for case in _cases_of(with_declared_workload(request, strategy), strategy)
    ]
    cases += [
        _against_cpu(case) for case in cases if case.device != "cpu" and IN_FLOAT32 in case.layers
    ]
    return with_unique_ids(cases)


def _cases_of(request: Request, strategy: str) -> Iterator[Case]:
    for spec in request.workloads:  # a strategy's own workload is seen here first
        check_workload(spec)
    workloads = dict.fromkeys(request.workloads or ALWAYS)
    if request.dtype not in (None, *EXACT_DTYPES):
        workloads.pop("exact", None)
    if not acceptance.keeps_exact_sums(request.accept):
        workloads.pop("exact", None)
    if not request.workloads and (request.accept or request.dtype not in (None, *EXACT_DTYPES)):
        workloads.pop("twelve_steps")  # only a mean handles the range of its gradients
    if not request.workloads and not acceptance.keeps_scalars(request.accept):
        workloads.pop("composite")
    for world in dict.fromkeys(request.worlds):
        yield from scheduled.schedule_search_cases(
            request, partial(_case, request, strategy, world)
        )
        for workload in (*workloads, *workloads_testing_promises(request, strategy, world)):
            for dtype in _dtypes(request, workload):
                yield _case(request, strategy, world, workload, dtype)
        for name, own, said in cells_to_run(request, world, besides=workloads):
            yield msgspec.structs.replace(_case(own, strategy, world, name, "float32"), **said)


def _against_cpu(case: Case) -> Case:
    """Return the same ranks on their device, compared with a full batch on the CPU: by the bound of
    full batch float32, and if that refuses, by the bound of `judge/oracles/between_devices.py`.
    """
    return msgspec.structs.replace(
        case,
        id=f"{case.id}-against-cpu",
        layers=(IN_FLOAT32,),
        rerun=False,
        reference_device="cpu",
    )


def _dtypes(request: Request, workload: str) -> list[str]:
    if request.dtype is not None:
        return [request.dtype]
    quick = facts_about(workload).in_float64 and acceptance.requires_full_batch(request.accept)
    quick = quick and (bool(request.workloads) or DEFAULT_RUN[workload].in_float64)
    return ["float32", "float64"] if quick else ["float32"]


def _case(request: Request, strategy: str, world: int, workload: str, dtype: str) -> Case:
    name = strategy.rpartition("/")[2].replace(".py:", "-").replace(":", "-")
    place = workload.rpartition("/")[2].replace(".py:", "-").replace(":", "-")
    layers = known_layers.layers_of(dtype)
    if not acceptance.requires_full_batch(request.accept):
        layers = tuple(layer for layer in layers if layer not in FULL_BATCH_LAYERS)
    cell, known = CELLS.get(workload), facts_about(workload)
    without = known.without if cell is None else cell.without
    layers = tuple(layer for layer in layers if layer not in without)
    data = known.data if cell is None else datasets.SYNTHETIC
    is_exact = workload.partition(":")[0] == "exact"
    companion = dtype == "float64" and request.dtype is None
    by_default = workload in DEFAULT_RUN and DEFAULT_RUN[workload].rerun
    reruns = cell is not None or bool(request.workloads) or by_default
    steps = steps_of(request, workload)
    if companion and request.steps is None:
        steps = min(steps, STEPS_IN_FLOAT64)
    suffix = "" if request.device == "cpu" else "-cuda"
    return Case(
        id=as_file_name(f"{name}-w{world}-{place}-{dtype}{suffix}"),
        strategy=strategy,
        world=world,
        dtype=dtype,
        workload=workload,
        data=data or request.data,
        batch=_batch_of(request, world),
        steps=steps,
        layers=("exact",) if is_exact else (IN_FLOAT64,) if companion else layers,
        rerun=reruns and not companion,
        loss=cast("LossName", request.loss),
        accept=acceptance.canonical_spelling(request.accept),
        **{name: getattr(request, name) for name in _AS_ASKED},
    )


def _batch_of(request: Request, world: int) -> int:
    """Return the requested batch; if ranks gather, reduced to a multiple of the world."""
    gathers = request.adaptation.form == "loss"
    return request.batch - request.batch % world if gathers else request.batch


def plan_checks(
    case: Case, facts: CaseFacts, *, sizes: Sequence[Sequence[int]], calibration_failure: str
) -> list[PlannedCheck]:
    """Return the checks of a case in the order of the report; `sizes` are [steps][world]."""
    model, accepted = facts.model, acceptance.parse_deviation(case.accept)
    needs = Coverage(case, facts.contract, model, sizes, facts.output)
    exact, bounded, semantic = _layers(case, facts, sizes, calibration_failure)
    own = "exact" if exact == "exact" else BITWISE
    further = known_layers.layers_for_any_case(case.layers)
    gradient_layers = [layer for layer in (exact, bounded, *semantic, *further) if layer]
    planned = [
        PlannedCheck(check="outcome", layer="-", scope="front", required=needs.outcome()),
        PlannedCheck(check="data", layer="-", scope="run", required=needs.data()),
        PlannedCheck(check="initial state", layer="-", scope="step", required=needs.initial()),
    ]
    combining = accepted if accepted is not None and accepted.combines_parameters else None
    if combining is not None:
        exact, bounded = BITWISE, ""  # each rank's own parameters, to the bit
        gradient_checks = needs.local_then_mean(combining.warmup)
    else:
        gradient_checks = [needs.check("gradients", at, model.parameters) for at in gradient_layers]
    planned += [needs.outputs(layer) for layer in semantic if needs.numbers]
    if facts.contract.sync != "out-of-sight" and (exact or bounded):
        planned.append(needs.check("local gradients", own, model.parameters))
    planned += gradient_checks
    if exact or bounded:
        planned.append(needs.loss(own))
    planned += [needs.loss(layer) for layer in semantic]
    updated = () if own == "exact" else model.optimizer
    # Bits of an update depend on the kind of device, and for some dtypes on an element's position.
    same_update = case.reference_device is None and not rounding_depends_on_position(
        case, facts.contract
    )
    if combining is not None:
        planned += needs.combined(combining)
    elif facts.updates_again and same_update:
        planned.append(needs.check("parameters", own, model.parameters, state=updated))
    itself = trained_with(case.adaptation.form) == case.workload
    if model.buffers and itself:
        planned += [needs.check("buffers", layer, model.buffers) for layer in semantic]
    if model.buffers and (exact or bounded):
        planned.append(needs.check("buffers", BITWISE, model.buffers))
    replicas = model.optimizer if facts.contract.optimizer_state != "sharded" else ()
    compared = (*model.parameters, *model.parameters, *replicas)
    # Ranks may add what they exchange in orders of their own, so each result is compared by itself.
    if combining is None and case.adaptation.form != "metric":
        planned.append(needs.check("agreement", "-", compared))
    planned += needs.basic_checks()
    one_mean = facts.contract.parallel == ()  # each rank has its own part of the mean
    exchanges = one_mean and len(case.with_data) > 1 and gradient_checks
    if exchanges or (itself and case.world > 1) or has_nothing_to_synchronize(case, facts.contract):
        planned.append(needs.sensitivity())
    if facts.must_happen:
        planned.append(needs.purpose())
    if case.rerun:
        planned.append(needs.rerun())
    note = _fallback_note(case, facts, sizes, calibration_failure)
    return [
        msgspec.structs.replace(p, note=note)
        if (p.check, p.layer) == ("gradients", ROUNDING)
        else p
        for p in planned
    ]


def _layers(
    case: Case, facts: CaseFacts, sizes: Sequence[Sequence[int]], calibration_failure: str
) -> tuple[str, str, list[str]]:
    """Return the layers that judge gradients: exact or "", rounding or "", semantic layers."""
    if facts.contract.parallel:  # sums are split over ranks: no rank's own part is known
        return "", "", [layer for layer in FULL_BATCH_LAYERS if layer in case.layers]
    ordered = facts.contract.order is not None and not calibration_failure
    if "exact" in case.layers:
        if not _why_not_exact(case, facts.contract, sizes):
            return "exact", "", []
        return (BITWISE if ordered else ""), ROUNDING, []
    exact = BITWISE if BITWISE in case.layers and ordered else ""
    # A forward pass over the full batch would draw other random numbers than the shards.
    no_full_batch = facts.draws_random_numbers or why_no_full_batch(case, facts, sizes)
    bounded = ROUNDING if ROUNDING in case.layers or no_full_batch else ""
    semantic = [layer for layer in FULL_BATCH_LAYERS if layer in case.layers and not no_full_batch]
    return exact, bounded, semantic


def _why_not_exact(case: Case, contract: Contract, sizes: Sequence[Sequence[int]]) -> str:
    world, loss = len(case.with_data), contract.loss_given(case.loss)
    shards = [n for step in sizes for n in step] if loss == "tokens" else []  # sums over them
    if loss != "mean" and any(n & (n - 1) for n in (world, *map(sum, sizes), *shards)):
        return f"a loss of {loss} over {world} ranks is not exact"
    return integers.why_not_exact(contract, dtype=case.dtype, world=world, shard_sizes=sizes)


def _fallback_note(
    case: Case, facts: CaseFacts, sizes: Sequence[Sequence[int]], calibration_failure: str
) -> str:
    if "exact" in case.layers:
        inexact = _why_not_exact(case, facts.contract, sizes)
        return f"not judged bitwise: {inexact}; judged by order and bound" if inexact else ""
    notes = []
    if facts.contract.order and calibration_failure:
        notes.append(f"{FALLS_BACK}{calibration_failure}")
    if facts.draws_random_numbers and set(case.layers) & set(FULL_BATCH_LAYERS):
        notes.append(
            "the forward pass draws random numbers (dropout?) that differ on every rank: rounding "
            "judges with each rank's draws, because no global batch can reproduce them"
        )
    return "; ".join(notes)
