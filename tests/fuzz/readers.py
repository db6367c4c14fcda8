"""The readers, each called in this process on files that may be damaged.

A reader returns an exit code; what it must not do is raise anything that is not for a person, or
answer with a pass that the undamaged files do not have. Where a command starts processes, what it
does before that is called: every file has been read by then.
"""

import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from random import Random
from typing import Any

import click
import msgspec
import torch

from distcheck import cli, registry
from distcheck.compare import command as comparing
from distcheck.compare.records import CompareRequest, verdict_on_changes
from distcheck.compare.traces import compare_traces
from distcheck.errors import DistcheckError, ExitCode
from distcheck.job import judging
from distcheck.job.guard.records import Divergence, ReplicaFinding, TensorProjections
from distcheck.job.options import JobOptions
from distcheck.job.running import CommandResult
from distcheck.plan.cases import check_case
from distcheck.plan.costs import measured_s
from distcheck.recordings.jobs import reading
from distcheck.recordings.jobs.records import OpCall, RecordedOps
from distcheck.recordings.scores import Scores, ScoresAbout, write_scores
from distcheck.recordings.traces import files
from distcheck.recordings.traces.reader import TraceReader
from distcheck.reports import training_report
from distcheck.reports.training_report import (
    SCHEMA,
    TrainedCase,
    TrainedEpoch,
    TrainedRun,
    read_training,
)
from distcheck.store import bundle
from distcheck.store.earlier_runs import changes_since_last_pass
from distcheck.store.run_folder import read_trace, saved_traces
from distcheck.verification import rechecking
from distcheck.worlds.jobs import Descriptors, Job
from distcheck.worlds.pool import Pool
from tests.fuzz.mutations import mutated
from tests.job.recordings import Facts, chain, make
from tests.sealing import keep_digests, seal_again

_MOST_BYTES = 24 << 30  # of addresses: what a number in a file must not make a reader take
_DIVERGENCE = Divergence(
    step=200, agreed_at=100, every=100, ranks=(0, 1), versions={"torch": "2"},
    findings=(
        ReplicaFinding(kind="parameters", first="w", groups=((0,), (1,)), differing=2, compared=2),
    ),
    sums=(TensorProjections(name="w", elements=64, by_rank=((1.0,) * 64, (1.1,) * 64)),),
)  # fmt: skip
_EPOCH = TrainedEpoch(
    loss=1.0, accuracy=0.5, tested=10, mean_step_s=0.5, step_losses=(1.0, 0.5), step_s=(0.5, 0.5)
)
_TRAINED = TrainedRun(
    schema=SCHEMA, epochs=(_EPOCH,),
    case=TrainedCase(
        strategy="ddp", world=2, workload="mlp", data="synthetic", batch=8, seed=0, dtype="float32"
    ),
)  # fmt: skip
_TRACE_FILES = ("about.json", "checksums.json", "run-1/index.bin", "run-1/slot-000.safetensors",
                "run-2/index.bin", "run-2/slot-001.safetensors")  # fmt: skip


class BrokenError(AssertionError):
    """A reader did what no reader may do."""


@dataclass(frozen=True)
class Answer:
    """What a reader said: its exit code, and its sentence where it refused."""

    code: int
    said: str = ""


@dataclass(frozen=True)
class Originals:
    """What is damaged: a saved run of a case that passes and of one that fails, its bundle, its
    report as the documents of two parts, and a configuration.
    """

    run: Path
    zip: Path
    parts: tuple[Path, Path]
    config: Path


class Quiet:
    """In place of a process's reporter."""

    def progress(self, step: int, phase: str) -> None:
        """Nothing."""


def command(*words: object) -> Answer:
    """A command of distcheck in this process, as `cli.main` runs it."""

    def run() -> int:
        arguments = [str(word) for word in words]
        return int(
            cli.root_command.main(arguments, standalone_mode=False, prog_name="distcheck") or 0
        )

    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        return answer_of(run)


def answer_of(run: Callable[[], int]) -> Answer:
    """The exit code that a call leads to. Any other exception passes: it is a traceback."""
    try:
        return Answer(run())
    except click.ClickException as error:
        return Answer(int(ExitCode.USAGE), error.format_message())
    except DistcheckError as error:
        return Answer(int(error.exit_code), str(error))


@contextmanager
def bounded() -> Iterator[None]:
    """Addresses are limited, so that a number in a file cannot take the machine's memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _outputs(folder: Path) -> list[object]:
    formats = ("json", "html", "junit")
    return [word for name in formats for word in (f"--{name}", folder / f"out.{name}")] + [
        "--github"
    ]


def report(originals: Originals, folder: Path, draw: Random) -> Answer:
    """`distcheck report`"""
    file = _damaged(draw.choice(originals.parts), folder, draw, "json")
    return command("report", file, *_outputs(folder))


def merge(originals: Originals, folder: Path, draw: Random) -> Answer:
    """`distcheck merge`, of one part that is damaged and one that is whole."""
    passed, failed = originals.parts
    whole, broken = draw.choice(((passed, failed), (failed, passed)))
    file = _damaged(broken, folder, draw, "json")
    given = [whole, file] if draw.random() < 0.8 else [file]
    answer = command("merge", *given, *_outputs(folder))
    if answer.code == 0:
        raise BrokenError("a pass, of a run with a case that failed")
    return answer


def config(originals: Originals, folder: Path, draw: Random) -> Answer:
    """`distcheck plan --config`, which plans all that `verify` would run."""
    file = _damaged(originals.config, folder, draw, "toml")
    return command("plan", "--config", file, "--json", folder / "out.json")


def replay(originals: Originals, folder: Path, draw: Random) -> Answer:
    """What `distcheck replay` reads: of a case, of a run."""
    shutil.copytree(originals.run / "cases", folder / "cases")
    file = _damaged_in_place(draw.choice(sorted((folder / "cases").iterdir())), draw, "json")
    given = draw.choice((file, folder))

    def read() -> int:
        for case in bundle.read_cases_to_replay(str(given)).cases:
            check_case(case)
        return 0

    return answer_of(read)


def bundled(originals: Originals, folder: Path, draw: Random) -> Answer:
    """What `distcheck replay` reads of a bundle, any member or the zip itself damaged."""
    import zipfile

    target = folder / "b.zip"
    if draw.random() < 0.3:
        target.write_bytes(mutated(originals.zip.read_bytes(), draw, "bytes"))
    else:
        with zipfile.ZipFile(originals.zip) as archive, zipfile.ZipFile(target, "w") as copy:
            names = archive.namelist()
            chosen = draw.choice([n for n in names if n.endswith(".json")] * 3 + names)
            for name in names:
                data = archive.read(name)
                if name == chosen:
                    kind = "json" if name.endswith(".json") else "bytes"
                    data = mutated(data, draw, kind)
                copy.writestr(name, data)

    def read() -> int:
        for case in bundle.read_cases_to_replay(str(target)).cases:
            check_case(case)
        return 0

    with _in(folder):
        return answer_of(read)


def pack(originals: Originals, folder: Path, draw: Random) -> Answer:
    """`distcheck bundle`, of a run in which a case or the report is damaged."""
    run = folder / "run"
    shutil.copytree(originals.run, run, ignore=shutil.ignore_patterns("traces"))
    file = draw.choice([*sorted((run / "cases").iterdir()), run / "report.json"])
    _damaged_in_place(file, draw, "json")
    with _in(originals.run.parent):
        return command("bundle", run, "-o", folder / "made.zip")


def recheck(originals: Originals, folder: Path, draw: Random) -> Answer:
    """What `distcheck recheck` reads. A file that is another than was saved is refused, unless a
    tensor file says the same in other words.
    """
    place = _copied_traces(originals, folder)
    name = draw.choice(_TRACE_FILES)
    before = (place / name).read_bytes()
    kind = "json" if name.endswith(".json") else "bytes"
    _damaged_in_place(place / name, draw, kind)
    changed = (place / name).read_bytes() != before
    answer = answer_of(lambda: _load(place))
    if changed and answer.code == 0 and name in ("about.json", "run-1/index.bin",
                                                 "run-2/index.bin"):  # fmt: skip
        raise BrokenError(f"{name} was damaged, and nothing noticed it")
    return answer


def edited(originals: Originals, folder: Path, draw: Random) -> Answer:
    """The same, where the checksums are those of what is there: an edited file."""
    place = _copied_traces(originals, folder)
    name = draw.choice(("about.json", "about.json", "run-1/index.bin"))
    kind = "json" if name.endswith(".json") else "bytes"
    _damaged_in_place(place / name, draw, kind)
    seal_again(place)
    return answer_of(lambda: _load(place))


def compare(originals: Originals, folder: Path, draw: Random) -> Answer:
    """What `distcheck compare` reads, and its comparison of traces, with any file damaged."""
    run = folder / "run"
    shutil.copytree(originals.run, run)
    place = sorted((run / "traces").iterdir())[0]
    if draw.random() < 0.25:
        _damaged_in_place(run / "report.json", draw, "json")
    elif draw.random() < 0.5:
        name = draw.choice(_TRACE_FILES)
        _damaged_in_place(place / name, draw, "json" if name.endswith(".json") else "bytes")
    else:
        _damaged_in_place(place / "about.json", draw, "json")
        seal_again(place)
    return answer_of(lambda: _compare(originals.run, run, place.name))


def digested(originals: Originals, folder: Path, draw: Random) -> Answer:
    """What `distcheck compare` reads of a run of `record --digests`, with any file damaged."""
    run = folder / "run"
    shutil.copytree(originals.run, run)
    place = sorted((run / "traces").iterdir())[0]
    keep_digests(place)
    name = draw.choice(("about.json", "checksums.json", "run-1/index.bin"))
    before = (place / name).read_bytes()
    _damaged_in_place(place / name, draw, "json" if name.endswith(".json") else "bytes")
    changed = (place / name).read_bytes() != before
    if sealed := name == "about.json" and draw.random() < 0.5:
        seal_again(place)
    answer = answer_of(lambda: _compare(originals.run, run, place.name))
    if changed and not sealed and answer.code == 0 and name != "checksums.json":
        raise BrokenError(f"{name} was damaged, and nothing noticed it")
    return answer


def earlier(originals: Originals, folder: Path, draw: Random) -> Answer:
    """What is read of earlier runs besides, for estimates and for what has changed since: a file
    that is damaged there is left out, without a word.
    """
    run = folder / "runs" / "20260131-120000-1"
    shutil.copytree(originals.run, run, ignore=shutil.ignore_patterns("traces"))
    file = draw.choice([*sorted((run / "cases").iterdir()), run / "report.json"])
    _damaged_in_place(file, draw, "json")

    def read() -> int:
        found = bundle.read_cases_to_replay(str(originals.run))
        measured_s(folder)
        changes_since_last_pass(folder / "runs", found.cases, found.made)
        return 0

    return answer_of(read)


def baseline(originals: Originals, folder: Path, draw: Random) -> Answer:
    """What `distcheck backends --baseline` reads."""
    from distcheck.addons.backend_probe.records import BackendResults, Probe
    from distcheck.addons.backend_probe.table import read_sweeps, render_json

    probe = Probe(operation="all_reduce", reduction="SUM", form="plain", dtype="float32", salt=0)
    sweep = BackendResults(
        backend="gloo", device="cpu", world=3,
        missing="", failure="", environment={"torch": "2.13.0"},
        cells=(probe.ended("right", "", 64),),
    )  # fmt: skip
    file = folder / "sweep.json"
    file.write_text(render_json([sweep], [], ExitCode.PASS))
    _damaged_in_place(file, draw, "json")

    def read() -> int:
        read_sweeps(file)
        return 0

    return answer_of(read)


def recording(originals: Originals, folder: Path, draw: Random) -> Answer:
    """What `distcheck job` reads of what its ranks wrote, and its checks of it: of a job
    whose gradients are three times what they should be.
    """
    job = folder / "job"
    job.mkdir()
    make(job, _thrice)
    names = ("rank.json", "read.json", "step-000001.json", "step-000002.safetensors")
    file = job / f"rank-000{draw.randint(0, 1)}" / draw.choice(names)
    _damaged_in_place(file, draw, "json" if file.suffix == ".json" else "bytes")

    def verdict_on_changes() -> int:
        asked = JobOptions(words=("python", "train.py"), steps=3, no_reference=True)
        found = reading.read_recording(job)
        for rank, step in found.records:
            found.modules(rank, step)
        report = judging.judge(asked, found, CommandResult(0, ()), None, "none was asked for")
        return {"pass": 0, "fail": 1, "unknown": 5}[report.verdict]

    answer = answer_of(verdict_on_changes)
    if answer.code == 0:
        raise BrokenError("a pass, of a job that is wrong")
    return answer


def _thrice(facts: Facts) -> None:
    facts.raw = {name: 3 * gradient for name, gradient in facts.raw.items()}
    facts.seen = chain((1.0, 2.0), (3.0, 4.0))
    facts.ops = RecordedOps((OpCall("aten.mm", "a", "b"),))


def explained(originals: Originals, folder: Path, draw: Random) -> Answer:
    """`distcheck explain`, of what a guard has saved."""
    file = folder / "step-000200.json"
    file.write_bytes(msgspec.json.encode(_DIVERGENCE))
    return command("explain", _damaged_in_place(file, draw, "json"))


def beside(originals: Originals, folder: Path, draw: Random) -> Answer:
    """What `distcheck train --overlay` reads, and its page."""
    file = folder / "table.json"
    file.write_bytes(msgspec.json.encode(_TRAINED))
    _damaged_in_place(file, draw, "json")

    def read() -> int:
        training_report.render([_TRAINED, read_training(file)], version="0")
        return 0

    return answer_of(read)


def scored(originals: Originals, folder: Path, draw: Random) -> Answer:
    """`distcheck compare --scores`, of files that differ by far more than their noise floor."""
    files = [folder / f"{name}.safetensors" for name in "ab"]
    lengths = torch.tensor([20, 12])
    for number, file in enumerate(files):
        columns = {
            "logprobs": -torch.arange(1.0, 31.0) / (1 + number),
            "floor": torch.full((30,), 1e-6),
            "if/temperature 0.9": -torch.arange(1.0, 31.0),
        }
        start = torch.ones_like(lengths)
        write_scores(Scores(file, ScoresAbout(), torch.arange(32), lengths, start, columns))
    _damaged_in_place(draw.choice(files), draw, "bytes")
    answer = command("compare", *files, "--scores")
    if answer.code == 0:
        raise BrokenError("a pass, of scores that differ")
    return answer


def rejudged(originals: Originals, folder: Path, draw: Random, pool: Pool) -> Answer:
    """`distcheck recheck` with its judges, of an edited about.json of a case that failed."""
    place = _copied_traces(originals, folder, number=1)
    _damaged_in_place(place / "about.json", draw, "json")
    seal_again(place)

    def verdict_on_changes() -> int:
        traces = saved_traces(folder)
        return int(rechecking.recheck(folder, traces, pool=pool).exit_code)

    answer = answer_of(verdict_on_changes)
    if answer.code == 0:
        raise BrokenError("a pass, of a case that failed")
    return answer


READERS: dict[str, Callable[[Originals, Path, Random], Answer]] = {
    "report": report, "merge": merge, "config": config, "replay": replay, "bundled": bundled,
    "pack": pack, "recheck": recheck, "edited": edited, "compare": compare,
    "digested": digested, "earlier": earlier, "baseline": baseline, "recording": recording,
    "explained": explained, "beside": beside,
    "scored": scored,
}  # fmt: skip
if not registry.is_installed("backend_probe"):
    del READERS["baseline"]


def _load(place: Path) -> int:
    (trace,) = [one for one in saved_traces(place.parents[1]) if one.folder == place]
    for fd in read_trace(_NO_POOL, trace):
        os.close(fd)
    return 0


def _compare(then: Path, now: Path, name: str) -> int:
    runs = [comparing.saved_run(folder) for folder in (then, now)]
    if not all(name in run.cases for run in runs):
        return int(ExitCode.UNKNOWN)
    traces = [run.cases[name] for run in runs]
    saved = [trace.saved for trace in traces]
    fds: list[int] = []
    first: list[int] = []
    try:
        for trace in traces:
            own = read_trace(_NO_POOL, trace, digests_suffice=True)
            fds += own
            first.append(own[0])
        job = CompareRequest(
            case=saved[1].case, contracts=(saved[0].facts.contract, saved[1].facts.contract),
            training=saved[0].facts.training, layouts=(saved[0].layout, saved[1].layout),
            tensors=all(one.tensors for one in saved),
        )  # fmt: skip
        readers = [
            TraceReader(fd, one.layout, tensors=job.tensors)
            for fd, one in zip(first, saved, strict=True)
        ]
        found = compare_traces(job, *readers)
        said = (runs[0].verdicts.get(name, "unknown"), runs[1].verdicts.get(name, "unknown"))
        verdict, _ = verdict_on_changes(found, [], said, bits=False)
        return {"pass": 0, "fail": 1, "unknown": 5}[verdict]
    finally:
        for fd in fds:
            os.close(fd)


def load_here(pool: object, job: Job[Any, None], request: Any, fds: Descriptors) -> None:
    """In place of `run_job`: the job that loads traces, in this process."""
    assert job.target.endswith("load_job")
    files.load_job(job.encode(request), fds, Quiet())  # type: ignore[arg-type]


_NO_POOL: Any = None


def _copied_traces(originals: Originals, folder: Path, number: int = 0) -> Path:
    found = sorted((originals.run / "traces").iterdir())[number]
    return Path(shutil.copytree(found, folder / "traces" / found.name))


def _damaged(original: Path, folder: Path, draw: Random, kind: str) -> Path:
    target = folder / original.name
    target.write_bytes(mutated(original.read_bytes(), draw, kind))
    return target


def _damaged_in_place(path: Path, draw: Random, kind: str) -> Path:
    path.write_bytes(mutated(path.read_bytes(), draw, kind))
    return path


@contextmanager
def _in(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
