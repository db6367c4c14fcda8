"""A saved run from elsewhere: what reads it runs nothing of it, or asks first, always by the same
function.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import click
import msgspec
import pytest

import distcheck
from distcheck import cli
from distcheck.errors import InternalError, UsageError
from distcheck.plan.provenance import Provenance, provenance_changes
from distcheck.records import Case, Compared, Outcome, PlannedCheck
from distcheck.records.exit_status import RankEnd
from distcheck.store.run_folder import saved_traces
from distcheck.verification import rechecking, verdicts
from tests.optional import needs_all
from tests.sealing import rewrite_about
from tests.sources import calls

ROOT = Path(distcheck.__file__).parent
# Commands that are given something to read, and what of that they run.
ASK = ("replay", "recheck", "compare")
RUN_NOTHING = ("bundle", "report", "open", "merge", "explain", "backends", "train")
RUN_WHAT_THE_PERSON_NAMED = ("verify", "plan", "explore")  # in a configuration of their own
WRITE = ("job", "record", "scale", "selftest", "list", "runs", "doctor")
# Modules that read a case from a file: a new one asks, or says here why it need not.
READERS = {
    **dict.fromkeys(
        ("cli/commands/replay.py", "cli/commands/recheck.py", "compare/command.py"), "asks"
    ),
    "addons/explore/failure_database.py": "reads what .distcheck keeps of this folder's own runs",
    "store/bundle.py": "packs, and hands cases to replay",
    "verification/rechecking.py": "judges what its caller asked for",
}  # fmt: skip
READ = ("read_case", "read_cases_to_replay", "open_bundle", "saved_traces", "saved_run")
CASE_ID = "allreduce-w2-mlp-small-float32"
THING = """
import pathlib
pathlib.Path({mark!r}).touch()
from distcheck.workloads.mlp import MLP
Thing = sync = MLP
"""


@needs_all
def test_every_command_that_reads_says_what_it_runs() -> None:
    context = click.Context(cli.root_command)
    found = set()
    for name in cli.root_command.list_commands(context):
        command = cli.root_command.get_command(context, name)
        assert command is not None
        if any(isinstance(one.type, click.Path) for one in command.params):
            found.add(name)
        trusts = any(one.name == "trust" for one in command.params)
        assert trusts == (name in ASK), name
    assert found == {*ASK, *RUN_NOTHING, *RUN_WHAT_THE_PERSON_NAMED, *WRITE}


@needs_all
def test_every_module_that_reads_cases_asks_by_one_function() -> None:
    called: dict[str, set[str]] = {}
    for file, name, _ in calls():
        called.setdefault(file, set()).add(name.rpartition(".")[2])
    found = {file: "require_trust" in names for file, names in called.items() if names & {*READ}}
    assert found == {name: why == "asks" for name, why in READERS.items()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "run"
    distcheck.verify(
        "allreduce", world=2, workload="mlp:small", dtype="float32", batch=8, steps=1,
        separate=False, save=folder,
    )  # fmt: skip
    return folder


@pytest.fixture(params=["workload", "strategy"])
def gift(
    request: pytest.FixtureRequest, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    kept_pool: None,
) -> Path:  # fmt: skip
    """The run in a folder of somebody else's, with code in it; we are in a checkout beside it."""
    gift, here = tmp_path / "gift", tmp_path / "checkout"
    shutil.copytree(made, gift)
    here.mkdir()
    monkeypatch.chdir(here)
    (gift / "w.py").write_text(THING.format(mark=str(tmp_path / "ran")))
    (name,) = [file.stem for file in (gift / "cases").iterdir()]
    was, is_now = {
        "workload": ('"mlp:small"', '"../gift/w.py:Thing"'),
        "strategy": ('"allreduce"', '"../gift/w.py:sync"'),
    }[request.param]

    def change(text: str) -> str:
        assert was in text
        return text.replace(was, is_now)

    for file in (gift / "cases" / f"{name}.json", gift / "report.json"):
        file.write_text(change(file.read_text()))
    report = json.loads((gift / "report.json").read_text())
    (gift / "report.json").write_text(json.dumps({**report, "made": None}))
    rewrite_about(gift / "traces" / name, change)
    return gift


def run(*words: object) -> int:
    return int(cli.root_command.main([str(word) for word in words], standalone_mode=False) or 0)


Words = Callable[[Path], list[object]]


@pytest.mark.parametrize("command", ["replay", "recheck", "compare"])
def test_code_of_a_saved_run_is_asked_about(command: str, gift: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        run(command, gift, "-q")
    assert "runs untrusted code" in str(caught.value)
    assert "../gift/w.py" in str(caught.value)
    assert str(caught.value).endswith("review it, then pass --trust to run it")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["compare", "GIFT", "GIFT", "-q"],
        ["report", "GIFT", "--html", "r.html"],
        ["merge", "GIFT/report.json"],
        ["bundle", "GIFT", "-o", "b.zip"],
        ["open", "GIFT"],
        ["runs"],
    ],
    ids=lambda words: " ".join(words[:1]),
)
def test_nothing_of_a_saved_run_is_run_by_the_others(
    words: list[str], gift: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROWSER", "true")
    shutil.copytree(gift, ".distcheck/runs/20260131-120000-1")
    given = [word.replace("GIFT", str(gift)) for word in words]
    if words[0] in ("merge", "bundle"):
        with pytest.raises(UsageError, match=r"has neither a plan|w\.py:\w+ is not packed"):
            run(*given)
    else:
        assert run(*given) == 0
    assert not (tmp_path / "ran").exists()


def test_with_trust_it_is_judged(gift: Path, tmp_path: Path) -> None:
    """The code runs, whatever comes of it: as a strategy, it is none."""
    try:
        run("recheck", gift, "-q", "--trust")
    except UsageError as error:
        assert "untrusted code" not in str(error)  # noqa: PT017
    assert (tmp_path / "ran").exists()


def test_what_is_judged_is_what_was_asked_about(
    gift: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Path
) -> None:
    """A folder of another user's may be another one after the question."""
    (trace,) = saved_traces(made)
    (theirs,) = (gift / "traces").iterdir()
    hostile = (theirs / "about.json").read_bytes(), (theirs / "checksums.json").read_bytes()
    shutil.rmtree(theirs)
    shutil.copytree(trace.folder, theirs)
    from distcheck.cli.commands import recheck

    def asked(*given: object, **more: object) -> None:
        for name, data in zip(("about.json", "checksums.json"), hostile, strict=True):
            (theirs / name).write_bytes(data)

    monkeypatch.setattr(recheck, "require_trust", asked)
    assert run("recheck", gift, "-q") == 0
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("what", ["a check", "all but the ends", "how much", "nothing"])
def test_a_run_that_is_to_be_judged_by_less_is_refused(what: str, made: Path) -> None:
    """Without the checks that would fail, a wrong run was a pass."""
    (trace,) = saved_traces(made)
    planned = trace.saved.planned
    gradients = next(p for p in planned if p.check == "gradients")
    less = {
        "a check": tuple(p for p in planned if p.check != "gradients"),
        "all but the ends": planned[:1],
        "how much": tuple(
            msgspec.structs.replace(p, required=Compared()) if p is gradients else p
            for p in planned
        ),
        "nothing": planned,
    }[what]
    edited = msgspec.structs.replace(trace.saved, planned=less)
    trace = dataclasses.replace(trace, saved=edited)
    if what == "nothing":
        rechecking._check_planned(trace)
    else:
        with pytest.raises(
            UsageError, match="does not have the tensors that its case needs for the check"
        ):
            rechecking._check_planned(trace)


def test_a_case_with_a_different_folder_name_is_refused(made: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(made, run)
    (place,) = (run / "traces").iterdir()
    for name, folder in ((f"{place.name}\\n::error::x", place), ("a b", place.with_name("a b"))):
        place = place.rename(folder)
        rewrite_about(place, lambda text, name=name: text.replace(CASE_ID, name))  # type: ignore[misc]
        with pytest.raises(UsageError, match="the name of its folder must be that of the case"):
            saved_traces(run)
        rewrite_about(place, lambda text, name=name: text.replace(name, CASE_ID))  # type: ignore[misc]


@pytest.mark.parametrize("rank", [0, 2, -1])
def test_a_rank_ends_once_or_is_refused(rank: int, made: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(made, run)
    (place,) = (run / "traces").iterdir()

    def change(text: str) -> str:
        about = json.loads(text)
        about["outcomes"][1]["rank"] = rank
        return json.dumps(about)

    rewrite_about(place, change)
    with pytest.raises(UsageError, match="damaged: it has the end of a rank twice, or of one that"):
        saved_traces(run)


def test_a_defect_that_no_rank_has_is_unknown() -> None:
    planned = PlannedCheck(check="outcome", layer="-", scope="front", required=Compared(ranks=2))
    ended = [Outcome(rank=rank, outcome=RankEnd.FINISHED) for rank in range(2)]
    found = verdicts._outcome_check(planned, ended, InternalError("boom", "its traceback"))
    assert found.verdict == "unknown"


def test_a_digest_of_what_is_no_code_is_left_out() -> None:
    case = Case(id="c", strategy="ddp", world=2, workload="mlp")
    then, now = (
        Provenance(environment={}, digests={"strategy": digest, "strategy\x1b[2J": "a", "id": "b"})
        for digest in ("1", "2")
    )
    (change,) = provenance_changes(
        then, msgspec.structs.replace(now, digests={"strategy": "2"}), case
    )
    assert (change.name, change.then, change.now) == ("strategy ddp", "1", "2")
