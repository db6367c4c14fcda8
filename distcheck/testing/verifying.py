"""`distcheck.verify(...)`: runs a verification in a test, a script or a notebook."""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import msgspec

from distcheck.errors import UsageError, did_you_mean
from distcheck.plan import cases as plan
from distcheck.plan import thorough as thorough_run
from distcheck.plan.settings import (
    SETTINGS,
    KeywordSettings,
    Request,
    with_adaptation,
    with_settings_in_signature,
)
from distcheck.records import Report
from distcheck.store.run_folder import RunStore
from distcheck.verification.given_objects import importable_names
from distcheck.verification.run import RunOptions, verify_cases

_DELAY = ("rank", "collective", "ms")


@with_settings_in_signature
def verify(
    strategy: str | os.PathLike[str] | Callable[..., Any] | Sequence[str],
    *,
    delays: Sequence[tuple[int, int, int]] = (),
    save: str | os.PathLike[str] | None = None,
    **asked: Unpack[KeywordSettings],
) -> Report:
    """Judge one or more gradient-sync strategies against single-process training.

    strategy    a name, "path/to/file.py:object", "pkg.mod:object", or a function or class that can
                be imported by its module and name; for a notebook, or a running script, its source
                is copied to `.distcheck/cells/`
    world       world size, or several to try; by default 4
    workload    names of workloads; by default those of `distcheck verify`
    batch       samples per step, over all ranks
    steps       steps of each workload; by default the workload's own number
    form ...    as the options --as, --arg, --set, --finish, --reset, --loss, --backend, --device,
                --accept
    without_data  ranks without a shard of the batch, such as a parameter server
    thorough    also run all cells except those in `without`; world sizes 2 to 6 if no `world` is
                given; a search of `explore_s` seconds for each strategy (0: none)
    separate    True if the second world's ranks run in separate interpreters
    delays      (rank, n, ms): delays of ranks of the first world before their n-th collective
    save        folder for cases, traces and the report; by default nothing is written

    All other arguments correspond to the option of the same name. Returns the report; its
    `raise_for_verdict()` raises AssertionError unless it passed. Every call starts new ranks.
    Raises UsageError for invalid arguments, CannotRunError if the verification cannot run.
    """
    fields = {"strategies": importable_names(strategy), **_fields(asked)}
    fields["delays"] = [dict(zip(_DELAY, late, strict=False)) for late in delays]
    return _verify(_request(fields), save)


def _fields(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments as fields of a request, without those that are None."""
    by_parameter = {setting.parameter: name for name, setting in SETTINGS.items()}
    fields: dict[str, Any] = {}
    for parameter, value in asked.items():
        if parameter not in by_parameter or parameter == "strategy":
            meant = did_you_mean(parameter, inspect.signature(verify).parameters)
            raise TypeError(f"verify() got an unexpected keyword argument {parameter!r}{meant}")
        name = by_parameter[parameter]
        if SETTINGS[name].repeated and isinstance(value, str | int):
            value = (value,)
        if value is not None:
            fields[name] = os.fspath(value) if isinstance(value, os.PathLike) else value
    return with_adaptation(fields)


def _verify(request: Request, save: str | os.PathLike[str] | None) -> Report:
    keep = None if save is None else RunStore.at(Path(save))
    cases, extras = plan.plan_cases(request), thorough_run.thorough_extras([request])
    return verify_cases(cases, RunOptions(keep=keep, extras=extras))


def _request(fields: dict[str, Any]) -> Request:
    try:
        request = msgspec.convert(fields, Request)
        return thorough_run.with_thorough_worlds(request, world_given="worlds" in fields)
    except msgspec.ValidationError as error:
        raise UsageError(f"verify() does not take these arguments: {error}") from None
