"""Settings of a verification, each declared once: a field here is an option of `verify` and `plan`,
a key of the configuration, a parameter of `distcheck.verify(...)`, and a field of a request.

A new setting needs a field here, its line in `KeywordSettings`, and the code that reads it. Other
commands select theirs by name (`cli/options.py`); tests/unit/test_settings.py checks that all
agree. This module imports neither torch nor click.
"""

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, TypedDict, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta

from distcheck.records import Adaptation, Delay

F = TypeVar("F", bound=Callable[..., Any])
Names = Callable[[], Iterable[str]]

Words = Annotated[list[str], Meta(min_length=1)]
Count = Annotated[int, Meta(ge=1)]
Counts = Annotated[list[Count], Meta(min_length=1)]
Ranks = Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Table = dict[str, Any]


JUDGED, CALLED, RANKS = "Checks", "How the strategy is called", "Data and ranks"


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """Declaration of a setting for the command line, the configuration and Python.

    kind      type of its configuration key, if that is not one value of the field's type
    takes     description of `kind`
    help      help text of its option
    metavar   placeholder of the value in the help text
    default   description of the default, if clearer than the value
    type      type of one value of the option; default: the field's type
    repeated  True if the option may be given several times
    names     known values
    is_open   True if a file or a module is accepted in addition to `names`
    of_all    True if the key applies to all strategies of a matrix
    heading   group of its option in `--help`
    option, key, parameter    its names on the command line, in the configuration and in Python,
              if they differ from the field's
    """

    kind: Any = None
    takes: str = "true or false"
    help: str
    metavar: str | None = None
    default: str = ""
    type: Any = None
    repeated: bool = False
    names: Names | None = None
    is_open: bool = False
    of_all: bool = False
    heading: str = JUDGED
    option: str = ""
    key: str = ""
    parameter: str = ""


_of_ranks, _called = partial(Setting, heading=RANKS), partial(Setting, heading=CALLED)


def _strategies() -> Iterable[str]:
    from distcheck.training import loading

    return sorted(loading.strategy_names())


def _workloads() -> Iterable[str]:
    from distcheck.training import loading

    return sorted(loading.workload_names())


def _backends() -> Iterable[str]:
    from distcheck import backends

    return backends.names_with_orders()


def _dtypes() -> Iterable[str]:
    return DTYPES


def _devices() -> Iterable[str]:
    from distcheck.machine.devices import DEVICES

    return DEVICES


def _data() -> Iterable[str]:
    from distcheck.workloads.datasets import dataset_names

    return dataset_names()


def _forms() -> Iterable[str]:
    from distcheck.training.adapters.forms import form_names

    return form_names()


def _losses() -> Iterable[str]:
    from distcheck.training.adapters.options import LOSSES

    return LOSSES


def _cells() -> Iterable[str]:
    from distcheck.workloads.cells import CELLS

    return CELLS


DTYPES = ("float32", "float64", "bfloat16", "float16")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a comparison, with their defaults."""

    strategies: Annotated[
        tuple[str, ...],
        Setting(
            kind=Words,
            takes='names or FILE.py:OBJECT, as in ["ddp", "sync.py:average"]',
            help="Strategy to judge; may be repeated.",
            default="the matrix of pyproject.toml",
            metavar="NAME|FILE.py:OBJ|MOD:OBJ",
            repeated=True,
            names=_strategies,
            is_open=True,
            of_all=True,
            option="--strategy",
            parameter="strategy",
        ),
    ] = ()
    worlds: Annotated[
        tuple[int, ...],
        Setting(
            kind=Counts,
            takes="numbers of ranks, each at least 1, as in [2, 4]",
            help="World size: the number of ranks; may be repeated.",
            default="4, or the number of ranks that a launcher started",
            metavar="N",
            repeated=True,
            option="--world",
            parameter="world",
        ),
    ] = (4,)
    workloads: Annotated[
        tuple[str, ...],
        Setting(
            kind=Words,
            takes='names of workloads, as in ["exact", "cnn"]',
            help="Workload to train; may be repeated.",
            default="exact, cnn, composite and twelve_steps, and the cell absent_on_some, "
            "which counts only if all ranks finish it",
            metavar="NAME",
            repeated=True,
            names=_workloads,
            is_open=True,
            option="--workload",
            parameter="workload",
        ),
    ] = ()
    thorough: Annotated[
        bool,
        Setting(
            help="Also run the cells (small models, each with one feature: tied weights, frozen "
            "layers, odd sizes, resume, ...) at world sizes 2 to 6, or those of --world, and "
            "search for failures for a minute. The estimated time is printed first.",
        ),
    ] = False
    explore_s: Annotated[
        float,
        Setting(
            kind=Annotated[float, Meta(ge=0)],
            takes="seconds to search with --thorough, from 0 (no search)",
            help="With --thorough: seconds to search for a failure of each strategy; 0 disables "
            "the search.",
            metavar="S",
        ),
    ] = 60.0
    without: Annotated[
        tuple[str, ...],
        Setting(
            kind=Words,
            takes="names of cells of --thorough",
            help="Cell of --thorough to exclude; may be repeated.",
            metavar="CELL",
            repeated=True,
            names=_cells,
        ),
    ] = ()
    dtype: Annotated[
        str | None,
        Setting(
            kind=Words,
            takes='names of dtypes, as in ["float32"]',
            help="Dtype: float32, float64, bfloat16 or float16.",
            default="float32, and float64 if it is quick",
            metavar="NAME",
            names=_dtypes,
            key="dtypes",
        ),
    ] = None
    steps: Annotated[
        int | None,
        Setting(
            kind=Count,
            takes="a number of steps, at least 1",
            help="Number of steps to record; fewer than 3 miss bugs that appear late.",
            metavar="N",
            default="each workload's own number",
        ),
    ] = None
    batch: Annotated[
        int,
        _of_ranks(
            kind=Count,
            takes="a number of samples per step over all ranks, at least 1",
            help="Global batch size: samples per step over all ranks.",
            metavar="N",
        ),
    ] = 256
    data: Annotated[
        str,
        _of_ranks(
            takes="the name of a data set",
            help="Data set: synthetic, cifar10 or mnist.",
            metavar="NAME",
            names=_data,
            of_all=True,
        ),
    ] = "synthetic"
    data_dir: Annotated[
        str | None,
        _of_ranks(
            takes="a folder",
            help="Location of the data set's files: their folder, its parent, or the archive.",
            metavar="DIR",
            default="data",
            of_all=True,
        ),
    ] = None
    seed: Annotated[
        int,
        _of_ranks(
            kind=Annotated[list[Seed], Meta(min_length=1)],
            takes="integers from 0, as in [0, 1]",
            help="Seed of all RNG streams.",
            metavar="N",
            key="seeds",
        ),
    ] = 0
    backend: Annotated[
        str,
        _of_ranks(
            kind=Words,
            takes='names of backends, as in ["gloo"]',
            help="Backend for communication: gloo, mpi, nccl or simulated (all ranks in one "
            "process). simulated:ORDER sums in the order gloo, ring, tree, recursive-halving "
            "or rank.",
            metavar="NAME",
            names=_backends,
            key="backends",
        ),
    ] = "gloo"
    device: Annotated[
        str,
        _of_ranks(
            takes="cpu or cuda",
            help="Device of the ranks: cpu or cuda.",
            metavar="NAME",
            names=_devices,
            of_all=True,
        ),
    ] = "cpu"
    deadline_s: Annotated[
        float,
        _of_ranks(
            kind=Annotated[float, Meta(gt=0)],
            takes="seconds without progress after which a world counts as hung, more than 0",
            help="Time without progress after which a world counts as hung: 30s, 5m.",
            metavar="TIME",
            option="--deadline",
        ),
    ] = 30.0
    separate: Annotated[
        bool,
        _of_ranks(
            help="Rerun in separate interpreters, as on several machines. --no-separate is about "
            "2 s faster.",
        ),
    ] = True
    after_hang: Annotated[
        bool,
        _of_ranks(
            help="Also run the other cases of a strategy that hung. By default they are unknown, "
            "and the verdict remains fail.",
        ),
    ] = False
    fail_fast: Annotated[
        bool,
        _of_ranks(
            help="Stop at the first case that fails. Cases that were not judged are unknown, and "
            "the verdict remains fail.",
        ),
    ] = False
    schedules: Annotated[
        int,
        _of_ranks(
            kind=Annotated[int, Meta(ge=0)],
            takes="a number of schedules, from 0 (none)",
            help="With --backend simulated: also run this many schedules, which interleave ranks "
            "differently, and compare their results.",
            metavar="N",
        ),
    ] = 0
    preemptions: Annotated[
        int,
        _of_ranks(
            kind=Annotated[int, Meta(ge=0)],
            takes="a number of preemptions, from 0 (schedules are drawn)",
            help="With --backend simulated: run every schedule with at most this many "
            "preemptions, those with the fewest first; --schedules limits their number "
            "(1000).",
            metavar="K",
        ),
    ] = 0
    schedule: Annotated[
        str | None,
        _of_ranks(
            takes="a schedule, as a report prints it",
            help="With --backend simulated: run under this schedule, as a report prints it.",
            metavar="SCHEDULE",
            default="the default schedule",
        ),
    ] = None
    loss: Annotated[
        str,
        _called(
            takes="mean, mean/world, sum/global or tokens",
            help="Loss that your training loop passes to backward: mean (over the rank's "
            "samples), mean/world (that mean / world size), sum/global (sum over the rank's "
            "samples / all samples) or tokens (sum over the rank's tokens).",
            metavar="NAME",
            names=_losses,
        ),
    ] = "mean"
    accept: Annotated[
        str | None,
        _called(
            takes='an intended deviation, as --accept takes it: "low-precision:bf16"',
            help="Intended deviation to accept: low-precision:bf16 (gradients are reduced in "
            "bf16; or fp16, fp32), quantized:BITS, sparse:K, error-feedback, low-rank:RANK "
            "(PowerSGD), local-sgd:PERIOD (parameters are averaged every PERIOD steps), "
            "diloco:PERIOD or gossip.",
            metavar="KIND",
        ),
    ] = None


class AdapterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for calling code that was not written for distcheck. `with_adaptation` combines them
    into one field of a request.
    """

    form: Annotated[
        str | None,
        _called(
            takes="the name of a form",
            help="Form of the strategy, which determines how it is called: model, wrapper, "
            "comm-hook, ...",
            metavar="FORM",
            default="detected from its signature",
            names=_forms,
            option="--as",
            key="as",
        ),
    ] = None
    arguments: Annotated[
        tuple[str, ...],
        _called(
            kind=Table,
            takes="a table of values by the name of a parameter, as in { average = true }",
            help="Value of an argument of the strategy; may be repeated.",
            metavar="NAME=VALUE",
            repeated=True,
            option="--arg",
            key="arg",
        ),
    ] = ()
    variables: Annotated[
        tuple[str, ...],
        _called(
            kind=Table,
            takes="a table of values by the name in the module",
            help="Value of a global variable in the strategy's module; may be repeated.",
            metavar="NAME=VALUE",
            repeated=True,
            option="--set",
            key="set",
        ),
    ] = ()
    finish: Annotated[
        str | None,
        _called(
            takes="the name of a method",
            help="Method of a wrapper to call after backward, or none to call no method.",
            metavar="METHOD",
        ),
    ] = None
    reset: Annotated[
        str | None,
        _called(
            takes="the name of a method",
            help="Method of a wrapper to call before every step.",
            metavar="METHOD",
        ),
    ] = None
    without_data: Annotated[
        tuple[int, ...],
        _called(
            kind=Ranks,
            takes="numbers of ranks, from 0, as in [0]",
            help="Rank without a shard of the batch, for example a parameter server.",
            metavar="RANK",
            repeated=True,
        ),
    ] = ()


class KeywordSettings(TypedDict, total=False):
    """Keyword arguments of `distcheck.verify(...)`, for type checkers."""

    world: int | Sequence[int] | None
    workload: str | Sequence[str]
    thorough: bool
    explore_s: float
    without: str | Sequence[str]
    dtype: str | None
    steps: int | None
    batch: int
    data: str
    data_dir: str | os.PathLike[str] | None
    seed: int
    backend: str
    device: str
    deadline_s: float
    separate: bool
    after_hang: bool
    fail_fast: bool
    schedules: int
    preemptions: int
    schedule: str | None
    loss: str
    accept: str | None
    form: str | None
    arguments: Mapping[str, Any] | Sequence[str] | None
    variables: Mapping[str, Any] | Sequence[str] | None
    finish: str | None
    reset: str | None
    without_data: Sequence[int]


def _declared_settings(*structs: type[msgspec.Struct]) -> dict[str, Setting]:
    found = {}
    for one in structs:
        for name, hint in get_type_hints(one, include_extras=True).items():
            setting = next(s for s in hint.__metadata__ if isinstance(s, Setting))
            kind = _type_of(get_args(hint)[0])
            found[name] = msgspec.structs.replace(
                setting,
                kind=setting.kind or kind,
                type=None if kind is bool else kind,  # None: a flag
                option=setting.option or f"--{name.replace('_', '-')}",
                key=setting.key or name,
                parameter=setting.parameter or name,
            )
    return found


def _type_of(kind: Any) -> Any:
    """Return `int` for `int | None` and for `tuple[int, ...]`."""
    while arguments := get_args(kind):
        kind = arguments[0]
    return kind


CALLS: Mapping[str, Setting] = _declared_settings(AdapterSettings)
SETTINGS: Mapping[str, Setting] = {**_declared_settings(Settings), **CALLS}
DEFAULTS: Mapping[str, Any] = {
    field.name: field.default
    for one in (Settings, AdapterSettings)
    for field in msgspec.structs.fields(one)
}


def with_adaptation(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with one `adaptation` in place of the settings in `AdapterSettings`."""
    from distcheck.training.adapters.options import adaptation_of

    said = {name: asked[name] for name in CALLS if asked.get(name) is not None}
    rest = {name: value for name, value in asked.items() if name not in CALLS}
    return {**rest, "adaptation": adaptation_of(**said)}


def with_settings_in_signature(function: F) -> F:
    """Decorate a function to list the settings that it takes by `**asked` in its signature."""
    own = inspect.signature(function).parameters
    shown = [one for one in own.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    shown += [
        inspect.Parameter(s.parameter, inspect.Parameter.KEYWORD_ONLY, default=DEFAULTS[name])
        for name, s in SETTINGS.items()
        if s.parameter not in own
    ]
    function.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    return function


class Request(Settings, frozen=True, kw_only=True):
    """The options of one `distcheck verify`; fields have the names of the options."""

    adaptation: Adaptation = Adaptation()
    ranks_here: int | None = None  # ranks of a launcher's world on this machine
    cell_worlds: tuple[int, ...] = ()  # those of `worlds` in which cells run; empty: all
    delays: tuple[Delay, ...] = ()


def is_launched() -> bool:
    """Return True if a launcher has started this process as one of its ranks."""
    return any(name in os.environ for name in ("RANK", "WORLD_SIZE"))
