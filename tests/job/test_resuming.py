"""Jobs that continue another one: right restarts pass, and what a checkpoint lacks is named.

Each script runs as one rank, in a fork of this process; test_two_jobs.py has whole commands.
"""

import importlib.util
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

from distcheck.errors import UsageError
from distcheck.job import resuming
from distcheck.job.resuming import Earlier
from distcheck.judge.divergence import noise_floor
from distcheck.judge.divergence.noise_floor import NoiseFloor
from distcheck.recordings.jobs import reading
from tests.job.planted import FOLDER
from tests.job.recordings import make
from tests.job.scripts import recorded_file

BY_HAND, ACCELERATE = "resuming.py", "resuming_accelerate.py"
CHECKPOINT = {BY_HAND: "checkpoint.pt", ACCELERATE: "state"}
SAVED_AT = 3


class Bug(NamedTuple):
    name: str
    script: str
    find: str
    put: str
    cause: str
    both: bool = False  # the job that is continued has it as well
    then: tuple[str, str] = ("", "")  # an edit of the job that continues alone


BUGS = [Bug(**one) for one in tomllib.loads((FOLDER / "resuming.toml").read_text())["bug"]]
# One of each kind of thing in every run: state, data, and what a whole step shows.
ALWAYS = ("no optimizer",)


def text_of(script: str, *edits: tuple[str, str]) -> str:
    if script == ACCELERATE and importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed (the extra `frameworks` has it)")
    text = (FOLDER / script).read_text()
    for find, put in edits:
        assert not find or text.count(find) == 1, f"the edit fits {text.count(find)} places: {find}"
        text = text.replace(find, put) if find else text
    return text


class Whole(NamedTuple):
    """A job that was not interrupted: its recording, and the folder with its checkpoint."""

    earlier: Earlier
    there: Path


def recorded(script: str, folder: Path, *edits: tuple[str, str], draws: int = 0) -> Whole:
    text, words = text_of(script, *edits), ("--save-at", str(SAVED_AT))
    job = recorded_file(text, folder / "whole", folder / "there", *words)
    perturbed = [
        recorded_file(text, folder / f"moved-{draw}", folder / f"copy-{draw}", *words, draw=draw)
        for draw in range(1, draws + 1)
    ]
    floor = (
        noise_floor.measure_noise_floor(job, perturbed)
        if draws
        else NoiseFloor(why="it was not asked for")
    )
    return Whole(Earlier(folder / "whole", job, floor), folder / "there")


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Whole]:
    """By script, made when first used."""

    class Made(dict[str, Whole]):
        def __missing__(self, script: str) -> Whole:
            self[script] = recorded(script, tmp_path_factory.mktemp("whole"))
            return self[script]

    return Made()


def continued(
    whole: Whole, script: str, folder: Path, *edits: tuple[str, str], steps: int = 4
) -> resuming.Judged:
    words = ("--resume", CHECKPOINT[script])
    text = text_of(script, *edits)
    job = recorded_file(text, folder / "resumed", whole.there, *words, steps=steps)
    return resuming.judge(whole.earlier, job)


@pytest.mark.parametrize("script", [BY_HAND, pytest.param(ACCELERATE, marks=pytest.mark.sweep)])
def test_a_right_restart_passes(script: str, wholes: dict[str, Whole], tmp_path: Path) -> None:
    results, causes, note = continued(wholes[script], script, tmp_path)
    assert [(one.check, one.verdict, one.reason) for one in results] == [
        (name, "pass", "") for name in ("resumed state", "resumed data", "resumed training")
    ]
    assert (causes, results[-1].compared.steps) == ([], 4)
    assert f"resumes before step {SAVED_AT}" in note


@pytest.mark.parametrize(
    "name",
    [
        name if name in ALWAYS else pytest.param(name, marks=pytest.mark.sweep)
        for name in (bug.name for bug in BUGS)
    ],
)
def test_lost_state_is_named(name: str, wholes: dict[str, Whole], tmp_path: Path) -> None:
    bug = next(bug for bug in BUGS if bug.name == name)
    edit = (bug.find, bug.put)
    draws = 1 if bug.cause == "unexplained" else 0
    own = draws or bug.both
    whole = wholes[bug.script]
    if own:
        edits = [edit] if bug.both else []
        whole = recorded(bug.script, tmp_path / "own", *edits, draws=draws)
    then = [(bug.then[0], bug.then[1])] if bug.then[0] else []
    results, causes, _ = continued(whole, bug.script, tmp_path, edit, *then)
    assert [one.cause for one in causes] == [bug.cause]
    assert [one.verdict for one in results].count("fail") == 1


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(10))
def test_right_restarts_of_other_seeds_pass(seed: int, tmp_path: Path) -> None:
    edit = ("    torch.manual_seed(0)\n", f"    torch.manual_seed({seed + 10})\n")
    whole = recorded(BY_HAND, tmp_path / "own", edit)
    results, causes, _ = continued(whole, BY_HAND, tmp_path, edit)
    assert ([one.verdict for one in results], causes) == (["pass"] * 3, [])


RIGHT = {  # what is no part of the training's state, or is restored in another way
    "a copy of the best model": ("            step += 1\n",
        "            step += 1\n            best = {n: p.detach().clone() for n, p in "
        "net.named_parameters()}\n"),
    "a copy that does not move": ("    average = copy.deepcopy(net).requires_grad_(False)\n",
        "    average = copy.deepcopy(net).requires_grad_(False)\n    other = copy.deepcopy(net)\n"),
    "a frozen layer": ("    model = DistributedDataParallel(net)\n",
        "    net[0].requires_grad_(False)\n    model = DistributedDataParallel(net)\n"),
    "SGD without momentum": ("torch.optim.AdamW(model.parameters(), lr=1e-2)",
        "torch.optim.SGD(model.parameters(), lr=1e-2)"),
    "a fused optimizer": ("lr=1e-2)", "lr=1e-2, fused=True)"),
    "no schedule": ("            scheduler.step()\n", ""),
    "two groups": ("torch.optim.AdamW(model.parameters(), lr=1e-2)",
        "torch.optim.AdamW([{'params': net[0].parameters()}, {'params': net[1:].parameters(), "
        "'lr': 1e-3}], lr=1e-2)"),
    "autocast": ("            loss = F.cross_entropy(model(inputs), labels)\n",
        "            with torch.autocast('cpu', dtype=torch.bfloat16):\n"
        "                loss = F.cross_entropy(model(inputs), labels)\n"),
    "at the end of an epoch": ("batch_size=asked.batch", "batch_size=27"),
}  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("name", RIGHT)
def test_unusual_right_restarts_pass(name: str, tmp_path: Path) -> None:
    whole = recorded(BY_HAND, tmp_path / "own", RIGHT[name])
    results, causes, _ = continued(whole, BY_HAND, tmp_path, RIGHT[name])
    assert ([one.verdict for one in results], causes) == (["pass"] * 3, [])


def test_another_model_is_refused(wholes: dict[str, Whole], tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match="is a recording of a different model: only one of the two has"
    ):
        resuming.judge(wholes[BY_HAND].earlier, make(tmp_path))


def test_a_job_resumed_at_its_end_is_unknown(wholes: dict[str, Whole], tmp_path: Path) -> None:
    whole = wholes[BY_HAND]
    folder = whole.earlier.folder
    before = reading.read_recording(folder)
    before.steps = before.steps[:SAVED_AT]
    results, _, _ = continued(
        Whole(Earlier(folder, before, NoiseFloor()), whole.there), BY_HAND, tmp_path, steps=1
    )
    assert results[0].verdict == "unknown"
    assert "record more of the earlier job with --steps" in results[0].reason
