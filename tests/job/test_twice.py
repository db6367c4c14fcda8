"""A job that runs twice: planted sources of nondeterminism are named, and their deterministic twins
are silent.
"""

import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import MagicMock, patch

import pytest
import torch

from distcheck.errors import DistcheckError, UsageError
from distcheck.job import perturbed_runs, twice
from distcheck.job.copying import ProjectCopy
from distcheck.job.machines import GatheredMachines
from distcheck.job.options import JobOptions
from distcheck.job.running import CommandResult
from distcheck.job.settings import JobSettings
from distcheck.job.twice import Repeat, SourceSearch, chance
from distcheck.recordings.jobs.reading import JobRecording
from distcheck.records import CaseReport
from distcheck.worlds import pinning
from tests.job.recordings import Facts, make
from tests.job.test_examples import cli
from tests.job.worlds import record

SCRIPT = """
import os, random, time, uuid, numpy, torch
import torch.distributed as dist
torch.manual_seed(0)
noise, rate = torch.zeros(6), lambda step: 0.1

def chance(most):  # from a source that no run pins
    with open("/dev/urandom", "rb") as source:
        return int.from_bytes(source.read(4), "little") % most

def body(x):
    return x

{before}
{planted}

class Net(torch.nn.Linear):
    def forward(self, x):
        return super().forward(body(x))

model = Net(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(20):
    inputs = torch.ones(4, 6) * (step + 1) + noise
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.param_groups[0]["lr"] = rate(step)
    optimizer.step()
"""


class Plant(NamedTuple):
    """A source of nondeterminism, its deterministic twin, and code before both."""

    cause: str
    wrong: str
    right: str
    before: str = ""
    where: str = ""  # in the line that is named
    world: int = 1
    whole: bool = False  # needs new interpreters


LOADER = """
class Data(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, index):
        time.sleep(chance(8) / 1000)
        return torch.full((6,), float(index))
def data(**about):
    loader = torch.utils.data.DataLoader(Data(), 4, num_workers=2, **about)
    return sum(batch.mean() * 0.5 ** number for number, batch in enumerate(loader))
"""
SCATTER = """
@torch.library.custom_op("planted::scatter", mutates_args=())
def scatter(x: torch.Tensor, atomic: bool) -> torch.Tensor:
    exact = torch.are_deterministic_algorithms_enabled() or not atomic
    return x.clone() if exact else x + 1e-6 * chance(1 << 20)
"""
REDUCE = """
dist.init_process_group("gloo")
def reduced(waits):
    found, works = torch.zeros(6), []
    for n in range(24):
        one = torch.ones(6) * (dist.get_rank() + 1)
        if dist.get_rank(): time.sleep(chance(3) / 200)
        works.append(dist.all_reduce(one, async_op=True))
        if waits: works[-1].wait()
        time.sleep(0.005)
        found += one * 2.0 ** -n
    return found, [work.wait() for work in works]
"""
DIRTY = """
def dirty():
    return torch.rand(5000, generator=torch.Generator().manual_seed(chance(1 << 30))) * 0
def body(x):
    torch.rand(5000, generator=torch.Generator().manual_seed(chance(1 << 30)))
    return x + memory(5000)[1000:1006]
"""
PLANTS = {
    "no seed": Plant("unseeded-rng", "torch.seed()", "torch.manual_seed(1)", where="torch.seed()"),
    "a NumPy generator": Plant(
        "unseeded-rng",
        "noise = torch.tensor(numpy.random.default_rng().random(6)).float()",
        "noise = torch.tensor(numpy.random.default_rng(0).random(6)).float()",
        where="default_rng()",
    ),
    "Python's generator": Plant(
        "unseeded-rng",
        "random.seed(); noise = random.random()",
        "random.seed(0); noise = random.random()",
        where="random.seed()",
    ),
    "a UUID": Plant(
        "unseeded-rng",
        "torch.manual_seed(uuid.uuid4().int % 1000003)",
        "torch.manual_seed(uuid.UUID(int=7).int); uuid.uuid4()",
        where="uuid4",
    ),
    "the process ID": Plant(
        "unseeded-rng",
        "torch.manual_seed(os.getpid())",
        "torch.manual_seed(os.getpid() * 0)",
        where="getpid",
    ),
    "the time as a seed": Plant(
        "clock-in-training",
        "torch.manual_seed(time.time_ns())",
        "torch.manual_seed(len(str(time.time_ns())))",
        where="time_ns",
    ),
    "the learning rate by the time": Plant(
        "clock-in-training",
        "rate = lambda step: time.perf_counter() - start",
        "rate = lambda step: 0.1 / (step + 1)",
        "start = time.perf_counter()",
    ),
    "a set of names": Plant(
        "depends-on-process-state",
        "noise = sum(len(name) * 0.3 ** i for i, name in enumerate(names))",
        "noise = sum(len(name) * 0.3 ** i for i, name in enumerate(sorted(names)))",
        "names = {'w' * n for n in range(1, 12)}",
        whole=True,
    ),
    "a hash as a seed": Plant(
        "depends-on-process-state",
        "torch.manual_seed(hash('run') % 1000003)",
        "torch.manual_seed(len('run'))",
        whole=True,
    ),
    "a set of tensors": Plant(
        "depends-on-process-state",
        "noise = sum(one.sum() * 0.9 ** i for i, one in enumerate({*parts}))",
        "noise = sum(one.sum() * 0.9 ** i for i, one in enumerate(parts))",
        "held = [torch.zeros(1) for _ in range(chance(500))]\n"
        "parts = [torch.full((2,), float(n)) for n in range(200)]",
    ),
    "a number of threads": Plant(
        "thread-count",
        "torch.set_num_threads(2 + chance(60)); noise = sums()",
        "torch.set_num_threads(2); noise = sums()",
        "values = torch.rand(1_000_000) * 1e3\n"
        "def sums(): return sum(values[i * 1000 :].sum() * 1e-8 * 0.5 ** i for i in range(16))",
        where="set_num_threads",
        whole=True,
    ),
    "workers out of order": Plant(
        "loader-workers",
        "noise = data(in_order=False)",
        "noise = data()",
        LOADER,
        where="DataLoader",
    ),
    "a collective that is not awaited": Plant(
        "collective-not-awaited",
        "noise = reduced(waits=False)[0]",
        "noise = reduced(waits=True)[0]",
        REDUCE,
        where="all_reduce",
        world=2,
    ),
    "atomic additions": Plant(
        "nondeterministic-operator",
        "body = lambda x: torch.ops.planted.scatter(x, True)",
        "body = lambda x: torch.ops.planted.scatter(x, False)",
        SCATTER,
        where="torch.ops.planted.scatter",
    ),
    "uninitialized memory": Plant(
        "uninitialized-memory", "memory = torch.empty", "memory = torch.zeros", DIRTY
    ),
}
DAILY = ("no seed", "the time as a seed")


def script_of(name: str, folder: Path, *, twin: bool) -> Path:
    plant, script = PLANTS[name], folder / "train.py"
    folder.mkdir(exist_ok=True)
    script.write_text(SCRIPT.replace("{before}", plant.before).replace(
        "{planted}", plant.right if twin else plant.wrong))  # fmt: skip
    return script


def judged(script: Path, folder: Path, world: int = 1) -> CaseReport:
    """The report on a script, each of whose runs is a fork of this process."""
    asked = JobOptions(words=("python", str(script)), steps=3, twice=True)
    settings = JobSettings(steps=3, kept=True)

    def record_again(
        asked: JobSettings, command: Sequence[str], copy: ProjectCopy, folder: Path, *,
        deadline_s: float, variables: Mapping[str, str],
    ) -> Path:  # fmt: skip
        about = {name: getattr(asked, name) for name in ("steps", "kept", "modules", "ops")}
        record(script, folder / "recording", world=world, variables=variables, **about)
        return folder / "recording"

    job = record(script, folder / "first", world=world, steps=3, kept=True)
    with patch.object(perturbed_runs, "record_again", record_again):
        return twice.judge(
            asked, settings, job, GatheredMachines(CommandResult(0, ())),
            ProjectCopy(script.parent, folder), folder, MagicMock(),
        )  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        name if name in DAILY else pytest.param(name, marks=pytest.mark.sweep)
        for name, plant in PLANTS.items()
        if not plant.whole
    ],
)
def test_a_planted_source_is_named_and_its_twin_is_silent(name: str, tmp_path: Path) -> None:
    plant = PLANTS[name]
    case = judged(script_of(name, tmp_path / "wrong", twin=False), tmp_path / "runs", plant.world)
    assert [one.cause for one in case.diagnosis] == [plant.cause], case
    assert case.verdict == "fail"
    if plant.where:
        assert case.where is not None
        assert plant.where in case.where.code
    right = judged(script_of(name, tmp_path / "right", twin=True), tmp_path / "twin", plant.world)
    assert (right.verdict, right.diagnosis, right.checks[1].verdict) == ("pass", (), "pass")
    assert right.checks[1].compared.elements > 10


@pytest.mark.sweep
@pytest.mark.parametrize("name", [name for name, plant in PLANTS.items() if plant.whole])
def test_a_source_in_new_interpreters_is_named(name: str, tmp_path: Path) -> None:
    """The whole command, since forks share a hash seed and have lost their threads."""
    for twin in (False, True):
        folder = tmp_path / str(twin)
        script_of(name, folder, twin=twin)
        words = ["--twice", "--steps", "3", "--json", "report.json", "--", sys.executable]
        ran = cli("job", folder, *words, "train.py")
        case = json.loads((folder / "report.json").read_text())["cases"][0]
        found = [one["cause"] for one in case["diagnosis"]]
        expected = (0, "pass", []) if twin else (1, "fail", [PLANTS[name].cause])
        assert (ran.returncode, case["verdict"], found) == expected, ran.stdout


class Runs:
    """Made-up runs: each has a new result, unless a source that `fixes` is pinned."""

    def __init__(self, *fixes: str, read: Sequence[str] = pinning.SOURCES, all_pinned: str = "x"):
        self.fixes, self.read, self.all_pinned = fixes, read, all_pinned
        self.pinned: list[tuple[str, ...]] = []

    def __call__(self, pins: tuple[str, ...]) -> Repeat:
        self.pinned.append(pins)
        fixed = {*pins} & {*self.fixes} or (len(pins) > 1 and self.all_pinned)
        content = "fixed" if fixed else str(len(self.pinned))
        return Repeat(content, dict.fromkeys(self.read, ("/a/train.py:3",)))


def searched(runs: Runs, *order: str, plain: Sequence[str] = ("a", "b")) -> SourceSearch:
    search = SourceSearch([*plain])
    search.run(runs, order)
    return search


def test_a_source_is_named_once_chance_is_excluded() -> None:
    for place, source in enumerate(("seeds", "clock", "threads")):
        search = searched(Runs(source), "seeds", "clock", "threads")
        assert (search.source, len(search.excluded)) == (source, place)
        assert {*search.pinned} == {"fixed"}
        assert chance(search.plain, search.pinned) * (place + 1) <= 0.05


def test_no_source_is_named_that_no_process_used() -> None:
    search = searched(Runs("workers", read=()), "workers", "seeds")
    assert (search.source, search.excluded, search.together) == ("", ["seeds"], True)


def test_no_source_is_named_if_all_of_them_pinned_diverge() -> None:
    runs = Runs(all_pinned="")
    search = searched(runs, "seeds", "clock", "hashing")
    assert (search.source, search.excluded) == ("", ["seeds", "clock", "hashing"])
    assert len(runs.pinned) == 5  # the others need no runs


def test_sources_that_suffice_only_together_are_not_named() -> None:
    search = searched(Runs(), "seeds", "clock")
    assert (search.source, search.excluded, search.together) == ("", ["seeds", "clock"], True)


def test_a_divergence_that_is_rare_names_no_source() -> None:
    """Half of the runs without a pinned source have the result of the pinned ones."""
    results = iter(["fixed", "2", "fixed", "4", "fixed", "6"])
    search = SourceSearch(["fixed", "b"])
    search.run(lambda pins: Repeat("fixed" if pins else next(results), {}), ("seeds",))
    assert (search.source, search.suspects, search.excluded) == ("", ["seeds"], [])
    assert len(search.pinned) == len(search.plain) == 6


def test_a_rare_divergence_is_explained_if_pinned_runs_have_a_new_result() -> None:
    """As uninitialized memory, which often holds zeros, and another number if it is filled."""
    results = iter(["0", "2", "0", "4"])
    search = SourceSearch(["0", "b"])
    pinned = {(): results, ("seeds",): itertools.repeat("0"), ("memory",): itertools.repeat("nan")}
    search.run(lambda pins: Repeat(next(pinned[pins]), {}), ("seeds", "memory"))
    assert (search.source, search.suspects) == ("memory", ["seeds"])


def test_only_the_first_run_differs() -> None:
    search = SourceSearch(["in place", "copy"])
    search.run(lambda pins: Repeat("copy", {}), ("seeds",))
    assert (search.only_the_first_differs, search.plain) == (True, ["in place", *["copy"] * 3])


def test_the_chance_that_pinned_runs_are_alike() -> None:
    assert chance("abc", "xxx") == 1 / 20
    assert chance("abcd", "xxxx") == 1 / 70
    assert chance("axx", "xxx") == 10 / 20  # C(5, 3) of C(6, 3)


# -- jobs that cannot be compared ------------------------------------------------------------------


def of_two(
    tmp_path: Path, second: JobRecording | Exception, hosts: tuple[str, ...] = (), **about: int
) -> CaseReport:
    """The report on a made-up job, of which the second and all further runs are `second`."""
    (tmp_path / "one").mkdir()
    job = make(tmp_path / "one", **about)
    asked = JobOptions(words=("python", "train.py"), steps=3, twice=True)
    with patch.object(twice.TwoRuns, "record", side_effect=itertools.repeat(second)) as record:
        if isinstance(second, Exception):
            record.side_effect = second
        (tmp_path / "recording").mkdir()
        whole = GatheredMachines(CommandResult(0, ()), hosts=hosts)
        copy = ProjectCopy(tmp_path, tmp_path)
        return twice.judge(asked, JobSettings(), job, whole, copy, tmp_path, MagicMock())


def made(folder: Path, **about: Any) -> JobRecording:
    folder.mkdir()
    return make(folder, **about)


def test_a_second_run_with_the_same_bits_passes(tmp_path: Path) -> None:
    case = of_two(tmp_path, made(tmp_path / "two"))
    assert (case.verdict, case.diagnosis) == ("pass", ())
    assert (case.checks[1].compared.steps, case.checks[1].compared.ranks) == (3, 2)


def test_a_second_run_that_fails_is_unknown(tmp_path: Path) -> None:
    case = of_two(tmp_path, DistcheckError("it ended with exit code 3"))
    assert case.verdict == "unknown"
    assert (
        case.checks[1].reason
        == "the command could not run a second time: it ended with exit code 3"
    )


def test_a_pinned_run_that_fails_excludes_its_source(tmp_path: Path) -> None:
    runs = twice.TwoRuns(
        JobOptions(words=("python",), twice=True), JobSettings(), ProjectCopy(tmp_path, tmp_path),
        tmp_path, MagicMock(),
    )  # fmt: skip
    with patch.object(runs, "record", side_effect=DistcheckError("it cannot run")):
        contents = []
        for number in range(2):
            runs.runs = number
            contents.append(runs.again(1)(("seeds",)).content)
        assert len({*contents}) == 2
        with pytest.raises(DistcheckError, match="it cannot run"):
            runs.again(1)(())


def test_several_machines_are_unknown(tmp_path: Path) -> None:
    case = of_two(tmp_path, made(tmp_path / "two"), hosts=("other",))
    assert (case.verdict, "several machines" in case.checks[1].reason) == ("unknown", True)


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"steps": 2}, "the first run made 3 steps from step 0 on, and the second 2 steps"),
        ({"world": 1}, "the first run had 2 ranks, 3 steps"),
    ],
)
def test_a_second_run_with_other_steps_or_ranks_diverges(
    about: dict[str, int], said: str, tmp_path: Path
) -> None:
    """All runs in copies agree, so that it may depend on the folder."""
    case = of_two(tmp_path, made(tmp_path / "two", **about))
    assert case.verdict == "unknown"
    assert said in case.checks[1].reason
    assert "runs in copies of the folder are bit-identical" in case.checks[1].reason


def test_another_model_diverges(tmp_path: Path) -> None:
    def smaller(facts: Facts) -> None:
        facts.holds = ("weight",)
        facts.before = {**facts.before, "bias": torch.zeros(4)}

    two = made(tmp_path / "two", change=smaller)
    assert twice.content_of(two, 1) != twice.content_of(made(tmp_path / "three"), 1)


def test_checks_that_twice_does_not_run_are_refused() -> None:
    with pytest.raises(UsageError, match="--weights is for other checks than --twice"):
        JobOptions(words=("python",), twice=True, weights="equal")
