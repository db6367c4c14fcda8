"""`distcheck.verify(...)`: a verification from a test, a script or a notebook."""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from distcheck.errors import UsageError
from distcheck.errors.spelling import did_you_mean
from distcheck.explore.beside import explore_beside
from distcheck.plan import cases as plan
from distcheck.plan import thorough as thorough_run
from distcheck.plan.cases import Request
from distcheck.plan.settings import SETTINGS, with_settings
from distcheck.records import Report
from distcheck.store.run_folder import Store
from distcheck.training.adapters.asked import adaptation_of
from distcheck.verification.given_objects import names_of
from distcheck.verification.run import verify_cases
from distcheck.workloads.datasets import SYNTHETIC

_DELAY = ("rank", "collective", "ms")


@with_settings
def verify(
    strategy: str | os.PathLike[str] | Callable[..., Any] | Sequence[str],
    *,
    world: int | Sequence[int] | None = None,
    workload: str | Sequence[str] = (),
    data: str = SYNTHETIC,
    data_dir: str | os.PathLike[str] | None = None,
    batch: int = 256,
    steps: int | None = None,
    seed: int = 0,
    backend: str = "gloo",
    device: str = "cpu",
    dtype: str | None = None,
    deadline_s: float = 30.0,
    form: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    variables: Mapping[str, Any] | None = None,
    finish: str | None = None,
    reset: str | None = None,
    without_data: Sequence[int] = (),
    loss: str = "mean",
    accept: str | None = None,
    thorough: bool = False,
    without: Sequence[str] = (),
    explore_s: float = 60.0,
    delays: Sequence[tuple[int, int, int]] = (),
    separate: bool = True,
    save: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> Report:
    """Judges one or more gradient-sync strategies against single-node training.

    strategy    a name, "path/to/file.py:object", "pkg.mod:object", or a function or class that can
                be imported by its module and name, as it stands there
    world       number of ranks, or several to try; by default 4
    workload    names of workloads; by default those that `distcheck verify` has
    batch       samples per step, over all ranks; `steps`: by default each workload's own
    form ...    as the options --as, --arg, --set, --finish, --reset, --loss, --backend, --device,
                --accept
    without_data  ranks without a shard of the batch, such as a parameter server
    thorough    all cells as well, but for those in `without`; worlds 2 to 6 if no `world` is given;
                a search of `explore_s` seconds for each strategy (0: none)
    delays      (rank, n, ms): ranks of the first world that are late for their n-th collective
    separate    whether the second world's ranks come from separate interpreters
    save        folder for cases, traces and the report; nothing is written without it
    Returns the report; its `raise_for_verdict()` raises AssertionError unless it passed. Ranks are
    fresh in every call. Raises UsageError for invalid arguments, CannotRunError for what cannot.
    """
    _check_names(settings)
    adapted = form, arguments or {}, variables or {}, finish, reset, without_data
    asked = {
        "strategies": names_of(strategy),
        "worlds": (4,) if world is None else (world,) if isinstance(world, int) else world,
        "workloads": (workload,) if isinstance(workload, str) else workload,
        "data": data,
        "data_dir": data_dir and os.fspath(data_dir),
        "batch": batch, "steps": steps, "seed": seed, "dtype": dtype, "deadline_s": deadline_s,
        "adaptation": adaptation_of(*adapted),
        "loss": loss, "accept": accept, "thorough": thorough,
        "without": (without,) if isinstance(without, str) else tuple(without),
        "explore_s": explore_s,
        "delays": [dict(zip(_DELAY, late, strict=False)) for late in delays],
        "separate": separate, "backend": backend, "device": device,
        **settings,
    }  # fmt: skip
    return _verify(_request(asked, world_given=world is not None), save)


def _check_names(settings: Mapping[str, Any]) -> None:
    if unknown := settings.keys() - SETTINGS.keys():
        name = min(unknown)
        meant = did_you_mean(name, inspect.signature(verify).parameters)
        raise TypeError(f"verify() got an unexpected keyword argument {name!r}{meant}")


def _verify(request: Request, save: str | os.PathLike[str] | None) -> Report:
    keep = None if save is None else Store.at(Path(save))
    cases, beside = plan.plan_cases(request), thorough_run.beside([request])
    return verify_cases(cases, keep=keep, beside=beside, explore=explore_beside)


def _request(asked: dict[str, Any], *, world_given: bool) -> Request:
    try:
        return thorough_run.widened(msgspec.convert(asked, Request), world_given=world_given)
    except msgspec.ValidationError as error:
        raise UsageError(f"verify() does not take these arguments: {error}") from None
