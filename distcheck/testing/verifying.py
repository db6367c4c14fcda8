"""`distcheck.verify(...)`: a verification from a test, a script or a notebook."""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import msgspec

from distcheck.errors import UsageError
from distcheck.errors.spelling import did_you_mean
from distcheck.explore.thorough_search import search_thoroughly
from distcheck.plan import cases as plan
from distcheck.plan import thorough as thorough_run
from distcheck.plan.request import Request
from distcheck.plan.settings import SETTINGS, KeywordSettings, with_adaptation, with_settings
from distcheck.records import Report
from distcheck.store.run_folder import Store
from distcheck.verification.given_objects import names_of
from distcheck.verification.run import RunOptions, verify_cases

_DELAY = ("rank", "collective", "ms")


@with_settings
def verify(
    strategy: str | os.PathLike[str] | Callable[..., Any] | Sequence[str],
    *,
    delays: Sequence[tuple[int, int, int]] = (),
    save: str | os.PathLike[str] | None = None,
    **asked: Unpack[KeywordSettings],
) -> Report:
    """Judges one or more gradient-sync strategies against single-node training.

    strategy    a name, "path/to/file.py:object", "pkg.mod:object", or a function or class that can
                be imported by its module and name, as it stands there; of a notebook, or a running
                script, its source is copied to `.distcheck/cells/`
    world       number of ranks, or several to try; by default 4
    workload    names of workloads; by default those that `distcheck verify` has
    batch       samples per step, over all ranks; `steps`: by default each workload's own
    form ...    as the options --as, --arg, --set, --finish, --reset, --loss, --backend, --device,
                --accept
    without_data  ranks without a shard of the batch, such as a parameter server
    thorough    all cells as well, but for those in `without`; worlds 2 to 6 if no `world` is given;
                a search of `explore_s` seconds for each strategy (0: none)
    separate    whether the second world's ranks come from separate interpreters
    delays      (rank, n, ms): ranks of the first world that are late for their n-th collective
    save        folder for cases, traces and the report; nothing is written without it
    All else is as the option of that name says. Returns the report; its `raise_for_verdict()`
    raises AssertionError unless it passed. Ranks are fresh in every call. Raises UsageError for
    invalid arguments, CannotRunError for what cannot.
    """
    fields = {"strategies": names_of(strategy), **_fields(asked)}
    fields["delays"] = [dict(zip(_DELAY, late, strict=False)) for late in delays]
    return _verify(_request(fields), save)


def _fields(asked: Mapping[str, Any]) -> dict[str, Any]:
    """What was asked for in Python, as a request has it; what is None was not."""
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
    keep = None if save is None else Store.at(Path(save))
    cases, extras = plan.plan_cases(request), thorough_run.thorough_extras([request])
    return verify_cases(cases, RunOptions(keep=keep, extras=extras, explore=search_thoroughly))


def _request(fields: dict[str, Any]) -> Request:
    try:
        request = msgspec.convert(fields, Request)
        return thorough_run.widened(request, world_given="worlds" in fields)
    except msgspec.ValidationError as error:
        raise UsageError(f"verify() does not take these arguments: {error}") from None
