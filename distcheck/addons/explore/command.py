"""Reads the options of `distcheck explore`, runs its searches and returns its exit code."""

import importlib.util
import itertools
import os
import re
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import click
import msgspec
from rich.console import Console

from distcheck.addons.explore.failure_database import FailureDatabase
from distcheck.backends import check_name, name_of
from distcheck.errors import CannotRunError, ExitCode, UsageError
from distcheck.plan import cases as plan
from distcheck.plan.configuration import BY_KEY, read_configuration
from distcheck.plan.settings import CALLS, Request, is_launched
from distcheck.records import Adaptation, Case
from distcheck.records.generated_words import EXPLORED_DTYPES, KINDS, OPTIMIZERS
from distcheck.reports.files import check_writable, write_text
from distcheck.reports.live import LiveProgress
from distcheck.store.run_folder import DEFAULT_FOLDER
from distcheck.training.adapters.options import adaptation_of, check_adaptation
from distcheck.worlds.pool import Pool

_MOST_WORLD = 16
_MOST_STEPS = 10
_MOST_COMBINATIONS = 64
_BACKENDS = ("gloo", "simulated")
_SECONDS = {"s": 1, "m": 60, "h": 3600}
_MOST_S = 7 * 24 * 3600
# Options that a search takes from a matrix; it draws worlds, workloads and the rest itself.
_TAKEN = (*CALLS, "loss", "accept")


# The most significant exit code of several searches comes first.
_WORST_FIRST = (
    ExitCode.INTERRUPTED, ExitCode.MISMATCH, ExitCode.RANK_FAILED, ExitCode.UNKNOWN, ExitCode.PASS,
)  # fmt: skip


def explorations(asked: dict[str, Any], given: frozenset[str]) -> list[dict[str, Any]]:
    """Return the options of each search: one search for `--strategy`, or one for each strategy in
    the matrix. An option on the command line overrides the matrix. Raises UsageError.
    """
    matrix = read_configuration(asked.pop("config"))
    strategies = (asked["strategy"],) if asked["strategy"] else matrix.strategies
    if not strategies and matrix.file:
        raise UsageError(
            f"{matrix.file}: {matrix.key('strategies')} is missing, and no --strategy was given; "
            "pass one of the two"
        )
    if len(strategies) > 1 and asked["json_file"] is not None:
        raise UsageError(
            f"--json takes the findings of one strategy; {matrix.file} has {len(strategies)}: "
            f"{', '.join(strategies)}; choose one with --strategy"
        )
    searches = []
    for strategy in strategies or (None,):
        said = {**matrix.keys, **(matrix.of(strategy) if strategy else {})}
        keys = {BY_KEY[key]: value for key, value in said.items() if BY_KEY[key] in _TAKEN}
        keys = {name: value for name, value in keys.items() if name not in given}
        searches.append({**asked, **keys, "strategy": strategy})
    return searches


def explore_command(searches: Sequence[dict[str, Any]]) -> int:
    """Run the searches one after another, with an equal share of the budget each, and print their
    findings. Return the most severe exit code. Raises DistcheckError.
    """
    checked = [_check_options(asked) for asked in searches]
    check_writable(searches[0]["json_file"])
    prepare_hypothesis()
    codes: list[ExitCode] = []
    for asked, (strategy, budget_s, vary) in zip(searches, checked, strict=True):
        if codes and not asked["quiet"]:
            click.echo()
        codes.append(_explore(asked, strategy, budget_s / len(searches), vary))
        if codes[-1] is ExitCode.INTERRUPTED:
            break
    return int(min(codes, key=_WORST_FIRST.index))


def _explore(
    asked: dict[str, Any], strategy: str, budget_s: float, vary: dict[str, list[str]]
) -> ExitCode:
    from distcheck.addons.explore import report
    from distcheck.addons.explore.running import Runner
    from distcheck.addons.explore.search import Search
    from distcheck.addons.explore.space import DIMENSIONS, cases

    _check_without(asked["without"], DIMENSIONS)
    begun = time.monotonic()
    space = partial(  # the search space, except for `without`
        cases, strategy, vary=vary, most_world=asked["world"], most_steps=asked["steps"],
        **{name: asked[name] for name in ("adaptation", "loss", "deadline_s", "backend")},
    )  # fmt: skip
    kept = FailureDatabase(strategy)
    earlier = [case for case in kept.read() if case.backend == asked["backend"]]
    pool = Pool()
    interrupted = False
    runner = Runner(pool)
    if name_of(asked["backend"]) == "simulated":
        runner.distrusts_kept = "simulated worlds are not reused; every case ran in a fresh one"
    with LiveProgress(Console(stderr=True, quiet=asked["quiet"])) as live:
        search = Search(
            runner=runner,
            space=space(without=asked["without"]),
            seed=asked["seed"],
            until=begun + budget_s,
            most_cases=asked["max_cases"],
            show=live.preparing,
            most_world=asked["world"],
        )
        try:
            live.preparing("importing torch, inspecting the strategy")
            pool.wait_ready()
            runner.look_at(_samples(strategy, asked, vary))
            if runner.left_out:
                search.space = space(without=(*asked["without"], *runner.left_out))
            search.until = max(search.until, time.monotonic() + 1.0)  # at least one case
            search.again(earlier)
            if search.finding is None:
                search.run()
        except KeyboardInterrupt:
            interrupted = True
            search.give_up()
        finally:
            if not interrupted:
                runner.close()
            pool.close()
    story = report.ExploreResult(
        strategy=strategy,
        seed=asked["seed"],
        spent_s=time.monotonic() - begun,
        search=search,
        earlier=len(earlier),
        unreadable=tuple(kept.unreadable),
        interrupted=interrupted,
        kept_as=kept.keep(search.finding.report.case) if search.finding else None,
    )
    if asked["json_file"] != "-":
        report.print_search(story, quiet=asked["quiet"])
    if asked["json_file"] is not None:
        write_text(asked["json_file"], report.as_json(story))
    if interrupted:
        click.echo("distcheck: interrupted; nothing is left running", err=True)
    return story.exit_code


def prepare_hypothesis() -> None:
    """Redirect the folder in which Hypothesis stores data. Raises CannotRunError if Hypothesis is
    not installed.
    """
    if importlib.util.find_spec("hypothesis") is None:
        raise CannotRunError(
            "distcheck explore draws its cases with hypothesis, which is not installed; run pip "
            "install 'distcheck[explore]'"
        )
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(DEFAULT_FOLDER / "hypothesis"))


def parse_duration(text: str) -> float:
    """Parse a duration such as `90s`, `5m` or `1h`, and return seconds. Raises UsageError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text.strip())
    seconds = float(found[1]) * _SECONDS[found[2]] if found else 0.0
    if not 0 < seconds <= _MOST_S:
        raise UsageError(
            f"--budget {text} is not a duration; pass a number and s, m or h, for example 90s, "
            "5m or 1h, at most 168h"
        )
    return seconds


def _check_options(asked: dict[str, Any]) -> tuple[str, float, dict[str, list[str]]]:
    """Validate the options. Return the strategy, the budget in seconds, and the argument values to
    vary. Raises DistcheckError.
    """
    if is_launched():
        raise UsageError("explore starts its own ranks; run it without a launcher")
    budget_s = parse_duration(asked["budget"])
    for option, value, least, most in (
        ("--world", asked["world"], 2, _MOST_WORLD),
        ("--steps", asked["steps"], 1, _MOST_STEPS),
        ("--max-cases", asked["max_cases"], 1, 10**9),
        ("--seed", asked["seed"], 0, 2**63 - 1),
    ):
        if value is not None and not least <= value <= most:
            raise UsageError(f"{option} {value} is out of range; it takes {least} to {most}")
    check_name(asked["backend"])
    if name_of(asked["backend"]) not in _BACKENDS:
        raise UsageError(
            f"--backend {asked['backend']} is not supported by explore; pass gloo, simulated or "
            "simulated:ORDER"
        )
    if asked["accept"] is not None:
        raise UsageError(
            f"--accept {asked['accept']} is not supported by explore, which compares every "
            "result with the mean; use distcheck verify"
        )
    if asked["adaptation"].without_data:
        raise UsageError(
            "--without-data is not supported by explore, whose cases assign a shard to every "
            "rank; use distcheck verify"
        )
    vary = _parse_vary(asked["vary"], asked["adaptation"])
    plan.check_request(
        Request(
            strategies=(asked["strategy"],) if asked["strategy"] else (),
            deadline_s=asked["deadline_s"],
            adaptation=asked["adaptation"],
            loss=asked["loss"],
        )
    )
    return asked["strategy"], budget_s, vary


def _check_without(words: Sequence[str], known: Sequence[str]) -> None:
    strange = [word for word in words if word not in known]
    if strange:
        raise UsageError(f"--without {strange[0]}: unknown word; choose from {', '.join(known)}")
    for what in (KINDS, OPTIMIZERS, EXPLORED_DTYPES):
        if set(what) <= set(words):
            raise UsageError(f"--without {', '.join(what)} excludes all of them; remove one")


def _parse_vary(words: tuple[str, ...], fixed: Adaptation) -> dict[str, list[str]]:
    vary: dict[str, list[str]] = {}
    for word in words:
        if not word.partition("=")[2] or word.startswith("="):
            raise UsageError(f"--vary {word!r} is not of the form NAME=VALUE")
        ((name, value),) = adaptation_of(arguments=[word]).arguments
        vary.setdefault(name, []).append(value)
        if name in dict(fixed.arguments):
            raise UsageError(f"--vary {name} and --arg both set its value; remove one of them")
        check_adaptation(Adaptation(arguments=((name, value),)), "mean")
    combinations = 1
    for values in vary.values():
        combinations *= len(values)
    if combinations > _MOST_COMBINATIONS:
        raise UsageError(
            f"--vary makes {combinations} combinations of values; pass at most {_MOST_COMBINATIONS}"
        )
    return vary


def _samples(strategy: str, asked: dict[str, Any], vary: dict[str, list[str]]) -> list[Case]:
    names = sorted(vary)
    cases = []
    for values in itertools.product(*(vary[name] for name in names)):
        chosen = tuple(zip(names, values, strict=True))
        given = asked["adaptation"]
        request = Request(
            strategies=(strategy,),
            workloads=("generated:linear1",),
            dtype="float32",
            loss=asked["loss"],
            backend=asked["backend"],
            adaptation=msgspec.structs.replace(given, arguments=(*given.arguments, *chosen)),
        )
        cases += plan.plan_cases(request)
    return cases
