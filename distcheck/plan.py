"""From what was asked for to cases, and from a case to the checks that it owes. No torch."""

import re
from collections.abc import Sequence

import msgspec

from distcheck import backends, datasets, loading
from distcheck.contract import Contract
from distcheck.errors import CannotRunError, UsageError
from distcheck.jobs import CaseFacts
from distcheck.oracles import lattice
from distcheck.records import Case, Compared, ModelLayout, TensorSpec

DTYPES = ("float32", "float64", "bfloat16", "float16")
EXACT_DTYPES = ("float32", "float64")
FULL_BATCH_LAYERS = ("S32", "S64")
_MOST_BATCH = 10**7
_MOST_STEPS = 10**5
_MOST_DEADLINE_S = 10**6
DEFAULT_WORKLOADS = ("lattice", "cnn")
# Workloads whose float64 pass costs seconds, not minutes; vgg11 takes ten times its float32 time.
QUICK_IN_FLOAT64 = ("mlp", "cnn")


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What `distcheck verify` was asked for; the options' own names."""

    strategies: tuple[str, ...]
    worlds: tuple[int, ...] = (4,)
    workloads: tuple[str, ...] = ()
    data: str = datasets.SYNTHETIC
    data_dir: str | None = None
    download: bool = False
    batch: int = 256
    steps: int = 3
    seed: int = 0
    dtype: str | None = None
    backend: str = "gloo"
    device: str = "cpu"
    deadline_s: float = 30.0


def check_request(request: Request) -> None:
    """Raises UsageError or CannotRunError for what can be told without torch."""
    if not request.strategies:
        known = ", ".join(sorted(loading.strategy_names()))
        raise UsageError(
            f"no strategy was given; known are {known}, or give path/to/file.py:object"
        )
    for spec in request.strategies:
        loading.check_spelling("strategy", spec, loading.strategy_names())
    for spec in request.workloads:
        loading.check_spelling("workload", spec, loading.workload_names())
    datasets.check_dataset(request.data)
    _check_numbers(request)
    if request.dtype is not None and request.dtype not in DTYPES:
        raise UsageError(f"unknown dtype {request.dtype!r}; known are {', '.join(DTYPES)}")
    if request.dtype not in (None, *EXACT_DTYPES) and "lattice" in request.workloads:
        raise UsageError(
            f"workload lattice does not run in {request.dtype}, which holds no sum of a batch of "
            f"integers exactly; give --dtype {' or '.join(EXACT_DTYPES)}, or another workload"
        )
    if request.backend not in backends.backend_names():
        raise CannotRunError(
            f"backend {request.backend!r} is not available; available is "
            f"{', '.join(backends.backend_names())}"
        )
    if request.device != "cpu":
        raise CannotRunError(f"device {request.device!r} is not available; available is cpu")


def _check_numbers(request: Request) -> None:
    for what, value, least, most in (
        ("--batch", request.batch, 1, _MOST_BATCH),
        ("--steps", request.steps, 1, _MOST_STEPS),
        ("--seed", request.seed, 0, 2**63 - 1),
    ):
        if not least <= value <= most:
            raise UsageError(f"{what} {value} is out of range; it takes {least} to {most}")
    if not 0 < request.deadline_s <= _MOST_DEADLINE_S:
        raise UsageError(
            f"--deadline-s {request.deadline_s} is out of range; it takes seconds, more than 0 and "
            f"at most {_MOST_DEADLINE_S}"
        )
    if not request.worlds:
        raise UsageError("no world was given; give at least one number of ranks")
    for world in request.worlds:
        if world < 1:
            raise UsageError(f"--world {world} is no world; it needs at least 1 rank")
        if request.batch < world:
            raise UsageError(
                f"--batch {request.batch} is smaller than --world {world}: a rank would have no "
                f"sample; give --batch {world} or more, or fewer ranks"
            )


def check_case(case: Case) -> Case:
    """A case as it may run. Raises UsageError for one that was edited into something else."""
    request = Request(
        strategies=(case.strategy,),
        worlds=(case.world,),
        workloads=(case.workload,),
        backend=case.backend,
        device=case.device,
        dtype=case.dtype,
        data=datasets.SYNTHETIC if case.data == "lattice" else case.data,
        data_dir=case.data_dir,
        batch=case.batch,
        steps=case.steps,
        seed=case.seed,
        deadline_s=case.deadline_s,
    )
    (planned,) = plan_cases(request)
    allowed = {planned.layers, ("S64",)} if case.dtype == "float64" else {planned.layers}
    if case.layers not in allowed:
        raise UsageError(
            f"layers {list(case.layers)} are not those of {case.workload} in {case.dtype}, "
            f"{list(planned.layers)}"
        )
    if (planned.dtype, planned.data) != (case.dtype, case.data):
        raise UsageError(f"{case.workload} does not run in {case.dtype} on {case.data}")
    if not re.fullmatch(r"[\w.+-]+", case.id) or case.id.startswith("."):
        raise UsageError(f"id {case.id!r} is no name for a file")
    return case


def plan_cases(request: Request) -> list[Case]:
    """The cases, strategy by strategy, world by world."""
    check_request(request)
    workloads = dict.fromkeys(request.workloads or DEFAULT_WORKLOADS)
    if request.dtype not in (None, *EXACT_DTYPES):
        workloads.pop("lattice", None)
    cases = [
        _case(request, strategy, world, workload, dtype)
        for strategy in dict.fromkeys(request.strategies)
        for world in dict.fromkeys(request.worlds)
        for workload in workloads
        for dtype in _dtypes(request, workload)
    ]
    ids = [case.id for case in cases]
    return [
        case if ids.count(case.id) == 1 else msgspec.structs.replace(case, id=f"{case.id}-{n}")
        for n, case in enumerate(cases)
    ]


def _dtypes(request: Request, workload: str) -> list[str]:
    if request.dtype is not None:
        return [request.dtype]
    return ["float32", "float64"] if workload in QUICK_IN_FLOAT64 else ["float32"]


def _case(request: Request, strategy: str, world: int, workload: str, dtype: str) -> Case:
    name = strategy.rpartition("/")[2].replace(".py:", "-").replace(":", "-")
    place = workload.rpartition("/")[2].replace(".py:", "-").replace(":", "-")
    layers = {
        "float32": ("X", "R", "S32"),
        "float64": ("X", "R", "S64"),
        "bfloat16": ("X", "R"),
        "float16": ("X", "R"),
    }[dtype]
    companion = dtype == "float64" and request.dtype is None
    return Case(
        id=f"{name}-w{world}-{place}-{dtype}",
        strategy=strategy,
        world=world,
        backend=request.backend,
        device=request.device,
        dtype=dtype,
        workload=workload,
        data=request.data if workload != "lattice" else "lattice",
        data_dir=request.data_dir,
        batch=request.batch,
        steps=request.steps,
        seed=request.seed,
        deadline_s=request.deadline_s,
        layers=("lattice",) if workload == "lattice" else ("S64",) if companion else layers,
        rerun=not companion,
    )


def notes_on(case: Case, sizes: Sequence[Sequence[int]]) -> list[str]:
    """What a person should know about a case before reading its verdict."""
    notes = []
    if case.world == 1:
        notes.append(
            "world 1 has nothing to synchronise: it shows that the code runs and leaves the "
            "gradients of one rank alone, nothing about scale, order or agreement"
        )
    if case.world == 2:
        notes.append(
            "world 2 cannot tell orders of summation apart: every order adds the same two numbers"
        )
    uneven = next((step for step in sizes if len(set(step)) > 1), None)
    if uneven is not None:
        shards = " + ".join(map(str, uneven))
        notes.append(f"unequal shards ({shards}): each must count by its number of samples")
    return notes


class PlannedCheck(msgspec.Struct, frozen=True, kw_only=True):
    """A check that a case owes, under one layer, and how much it must compare to count."""

    check: str
    layer: str
    scope: str
    owed: Compared
    note: str = ""


def plan_checks(
    case: Case, facts: CaseFacts, *, sizes: Sequence[Sequence[int]], calibration_failure: str
) -> list[PlannedCheck]:
    """The checks of a case in the order of the report; `sizes` are shard sizes per step."""
    model = facts.model
    owes = _Owed(case, model, sizes)
    exact, bounded, semantic = _layers(case, facts, sizes, calibration_failure)
    own = "lattice" if exact == "lattice" else "X"
    gradient_layers = [layer for layer in (exact, bounded, *semantic) if layer]
    planned = [
        PlannedCheck(check="outcome", layer="-", scope="front", owed=owes.outcome()),
        PlannedCheck(check="data", layer="-", scope="run", owed=owes.data()),
        PlannedCheck(check="initial state", layer="-", scope="step", owed=owes.initial()),
    ]
    if exact or bounded:
        planned.append(owes.check("local gradients", own, model.parameters))
    planned += [owes.check("gradients", layer, model.parameters) for layer in gradient_layers]
    if exact or bounded:
        planned.append(owes.loss(own))
    planned += [owes.loss(layer) for layer in semantic]
    updated = () if own == "lattice" else model.optimizer
    planned.append(owes.check("parameters", own, (*model.parameters, *updated)))
    if model.buffers and (exact or bounded):
        planned.append(owes.check("buffers", "X", model.buffers))
    compared = (*model.parameters, *model.parameters, *model.optimizer)
    planned.append(owes.check("agreement", "-", compared))
    if case.rerun:
        planned.append(owes.rerun())
    note = _fallback_note(case, facts, sizes, calibration_failure)
    return [
        msgspec.structs.replace(p, note=note) if (p.check, p.layer) == ("gradients", "R") else p
        for p in planned
    ]


def _layers(
    case: Case, facts: CaseFacts, sizes: Sequence[Sequence[int]], calibration_failure: str
) -> tuple[str, str, list[str]]:
    """(exact layer or "", "R" or "", semantic layers) by which gradients are judged."""
    ordered = facts.contract.order is not None and not calibration_failure
    if "lattice" in case.layers:
        if not _lattice_inexact(case, facts.contract, sizes):
            return "lattice", "", []
        return ("X" if ordered else ""), "R", []
    exact = "X" if "X" in case.layers and ordered else ""
    # A forward pass over the whole batch would draw other random numbers than the shards did.
    no_full_batch = facts.draws_random_numbers
    bounded = "R" if "R" in case.layers or no_full_batch else ""
    semantic = [layer for layer in FULL_BATCH_LAYERS if layer in case.layers and not no_full_batch]
    return exact, bounded, semantic


def _lattice_inexact(case: Case, contract: Contract, sizes: Sequence[Sequence[int]]) -> str:
    return lattice.why_not_exact(contract, dtype=case.dtype, world=case.world, shard_sizes=sizes)


def _fallback_note(
    case: Case, facts: CaseFacts, sizes: Sequence[Sequence[int]], calibration_failure: str
) -> str:
    if "lattice" in case.layers:
        inexact = _lattice_inexact(case, facts.contract, sizes)
        return f"no bits are owed: {inexact}; judged by order and bound" if inexact else ""
    notes = []
    if facts.contract.order and calibration_failure:
        notes.append(f"X falls back to R: {calibration_failure}")
    if facts.draws_random_numbers:
        notes.append(
            "the forward pass draws random numbers (dropout?), each rank its own: judged by R "
            "against every rank's own draws, no full batch could repeat them"
        )
    return "; ".join(notes)


class _Owed:
    """How much each check must compare: everything, on every rank, at every step."""

    def __init__(self, case: Case, model: ModelLayout, sizes: Sequence[Sequence[int]]) -> None:
        self._case, self._model, self._sizes = case, model, sizes

    def check(
        self, name: str, layer: str, tensors: Sequence[TensorSpec], scope: str = "step"
    ) -> PlannedCheck:
        elements = sum(t.elements for t in tensors) * self._case.world * self._case.steps
        return PlannedCheck(
            check=name,
            layer=layer,
            scope=scope,
            owed=self._all(len({t.name for t in tensors}), elements),
        )

    def loss(self, layer: str) -> PlannedCheck:
        owed = self._all(1, self._case.world * self._case.steps)
        return PlannedCheck(check="loss", layer=layer, scope="step", owed=owed)

    def outcome(self) -> Compared:
        return Compared(ranks=self._case.world)

    def data(self) -> Compared:
        return self._all(0, sum(map(sum, self._sizes)))

    def initial(self) -> Compared:
        tensors = (*self._model.parameters, *self._model.buffers)
        elements = sum(t.elements for t in tensors) * self._case.world
        return Compared(tensors=len(tensors), elements=elements, ranks=self._case.world, steps=1)

    def rerun(self) -> PlannedCheck:
        model, case = self._model, self._case
        state = (*model.parameters, *model.buffers, *model.optimizer)
        per_step = sum(t.elements for t in (*model.parameters, *model.parameters, *state))
        before = sum(t.elements for t in state)
        elements = case.world * (case.steps * per_step + before)
        tensors = 2 * len(model.parameters) + len(state)
        return PlannedCheck(
            check="rerun", layer="-", scope="run", owed=self._all(tensors, elements)
        )

    def _all(self, tensors: int, elements: int) -> Compared:
        case = self._case
        return Compared(tensors=tensors, elements=elements, ranks=case.world, steps=case.steps)
