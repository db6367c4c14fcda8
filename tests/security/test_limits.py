"""Whatever is in a file, reading it takes a bounded time and a bounded memory, and ends with a
sentence: for every file that a command reads.
"""

import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import distcheck
from distcheck import registry
from distcheck.errors import CannotRunError, DistcheckError, ExitCode, UsageError
from distcheck.job.guard import records as guard
from distcheck.plan.configuration import read_configuration
from distcheck.plan.provenance import code_digest, provenance_of
from distcheck.recordings.jobs import reading
from distcheck.recordings.traces import seal
from distcheck.records import Case, decoding
from distcheck.reports.documents import read_report
from distcheck.reports.training_report import read_training
from distcheck.store import run_folder, trust
from distcheck.store import run_folder as read_back
from distcheck.store.bundle import make_bundle, read_cases_to_replay
from distcheck.store.run_folder import read_case, saved_traces
from distcheck.verification.merging import merge_command
from distcheck.verification.rechecking import failed_without_trace
from tests.job.recordings import make
from tests.optional import left_of
from tests.security import zips

Reader = Callable[[Path], Any]


# The file, in the folder that `sound` makes, and what reads it.
FILES: dict[str, tuple[str, Reader]] = {
    "report": ("run/report.json", lambda f: read_report(f / "run/report.json")),
    "part": ("run/report.json", lambda f: merge_command(
        [str(f / "run/report.json")], files={}, quiet=True)),
    "report of a saved run": ("run/report.json", lambda f: failed_without_trace(f / "run", ())),
    "report to pack": ("run/report.json", lambda f: make_bundle(
        f / "run", f / "b.zip", traces=False)),
    "case": ("run/cases/case-w2.json", lambda f: read_case(f / "run/cases/case-w2.json")),
    "case of a run": ("run/cases/case-w2.json", lambda f: read_cases_to_replay(str(f / "run"))),
    "about.json": ("run/traces/case-w2/about.json", lambda f: saved_traces(f / "run")),
    "checksums.json": ("run/traces/case-w2/checksums.json", lambda f: saved_traces(f / "run")),
    "a rank of a job": ("job/rank-0000/rank.json", lambda f: reading.read_recording(f / "job")),
    "a step of a job": (
        "job/rank-0001/step-000001.json",
        lambda f: reading.read_recording(f / "job"),
    ),
    "samples of a job": ("job/rank-0001/read.json", lambda f: reading.read_recording(f / "job")),
    "guard": ("guard.json", lambda f: guard.read(f / "guard.json")),
    "training": ("training.json", lambda f: read_training(f / "training.json")),
    "baseline": ("sweep.json", lambda f: _read_sweeps(f / "sweep.json")),
    "configuration": ("c.toml", lambda f: read_configuration(str(f / "c.toml"))),
}  # fmt: skip
if not registry.is_installed("backend_probe"):
    del FILES["baseline"]


def _read_sweeps(file: Path) -> object:
    from distcheck.addons.backend_probe.table import read_sweeps

    return read_sweeps(file)


# What reads a file without a limit: the kernel's, the person's own code, or what this run wrote.
WITHOUT_LIMIT = {
    "addons/mpi/runtime.py": "/proc", "cli/commands/list.py": "installed strategies",
    "cli/commands/skill.py": "the package's own text",
    "job/inside/forks.py": "a copy of this replay", "job/inside/rank.py": "the script that runs",
    "job/inside/terms.py": "code that runs", "worlds/pinning.py": "this run's own folder",
    "worlds/remote/secret.py": "/proc", "job/replaying.py": "this run's own folder",
    "job/running.py": "this run's own folder", "job/settings.py": "this run's own folder",
    "machine/devices.py": "/proc", "machine/resources.py": "/proc and /sys",
    "records/causes/__init__.py": "the package's own table",
    "training/sources_only.py": "code that is about to be imported",
    "addons/simulated/rank_threads.py": "code that a test has imported",
    "worlds/launchers/mpirun.py": "/proc", "worlds/linux.py": "/proc and /etc",
    "worlds/local/forks.py": "/proc",
    "addons/simulated/patches.py": "code that a rank has imported",
}  # fmt: skip


def test_every_other_reader_is_known() -> None:
    root = Path(distcheck.__file__).parent
    found = {
        file.relative_to(root).as_posix()
        for file in root.rglob("*.py")
        if re.search(r"\.read_(bytes|text)\(", file.read_text())
    }
    assert found == left_of(WITHOUT_LIMIT)


@pytest.fixture
def sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file of every kind. A limit is small: what is beyond it is soon written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(decoding, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(guard, "_MOST_BYTES", 1 << 20)
    monkeypatch.setattr(run_folder, "_MOST_CASE_BYTES", 1 << 20)
    monkeypatch.setattr(decoding, "MOST_SOURCE_BYTES", 1 << 20)
    monkeypatch.setattr(decoding, "MOST_VALUES", 1000)
    for name in ("run/cases", "run/traces/case-w2/run-1", "job"):
        (tmp_path / name).mkdir(parents=True)
    case = tmp_path / "run/cases/case-w2.json"
    case.write_text(json.dumps({**zips.CASE, "strategy": "ddp"}))
    seal.write_about(tmp_path / "run/traces/case-w2", b"{}", ["x"])
    make(tmp_path / "job")
    for name in ("run/report.json", "guard.json", "training.json", "sweep.json", "c.toml"):
        (tmp_path / name).write_text("{}" if name.endswith("json") else "")
    (tmp_path / "code.py").write_text("def sync(model): ...")
    return tmp_path


def too_large(file: Path) -> None:
    """A file with a hole: a terabyte that takes no disk."""
    with file.open("wb") as out:
        out.truncate(1 << 40)


def device(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def pipe(file: Path) -> None:
    """One that no process writes."""
    file.unlink()
    os.mkfifo(file)


def folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def values(file: Path) -> None:
    file.write_text("[" + ",".join(["[]"] * 2000) + "]")


@pytest.mark.parametrize("spoil", [too_large, device, pipe, folder])
@pytest.mark.parametrize("name", FILES)
def test_every_reader_has_a_limit(name: str, spoil: Callable[[Path], None], sound: Path) -> None:
    file, read = FILES[name]
    spoil(sound / file)
    if (name, spoil) == ("configuration", pipe):  # which is an empty one
        assert read(sound).strategies == ()
    else:
        refused(lambda: read(sound))


@pytest.mark.parametrize("name", [n for n, (file, _) in FILES.items() if file.endswith(".json")])
def test_every_reader_of_json_has_a_limit_of_values(name: str, sound: Path) -> None:
    file, read = FILES[name]
    values(sound / file)
    said = refused(lambda: read(sound))
    if name != "about.json":  # whose checksum is another
        assert "it has more than 1,000 values" in said


def refused(read: Callable[[], Any]) -> str:
    with pytest.raises(DistcheckError) as caught:
        read()
    assert caught.value.exit_code == ExitCode.USAGE
    said = str(caught.value)
    assert len(said.splitlines()) == 1
    return said


def test_about_json_has_a_limit_where_its_checksum_is_right(sound: Path) -> None:
    seal.write_about(sound / "run/traces/case-w2", b'{"x":[' + b"0," * 2000 + b"0]}", ["x"])
    assert "it has more than 1,000 values" in refused(lambda: saved_traces(sound / "run"))


@pytest.mark.parametrize("name", ["bundle.json", "cases/case-w2.json"])
@pytest.mark.parametrize("what", ["bytes", "values"])
def test_bundle_members(name: str, what: str, sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = b" " * (2 << 20) if what == "bytes" else b"[" + b"[]," * 2000 + b"[]]"
    zipped = zips.write(sound / "b.zip", zips.members(sound / "ran") | {name: data})
    assert zipfile.is_zipfile(zipped)
    said = refused(lambda: read_cases_to_replay(str(zipped)))
    assert "is larger than" in said or "has more than 1,000 values" in said


def test_code_that_a_case_names_has_a_limit(sound: Path) -> None:
    case = Case(id="c", strategy=f"{sound}/code.py:sync", world=2, workload="mlp")
    (code,) = trust.untrusted_code([msgspec.structs.replace(case, strategy="/dev/zero:sync")])
    assert code.file == ""
    made = {"c": provenance_of(case, {})}
    assert trust.untrusted_code([case], made=made) == []
    too_large(sound / "code.py")
    said = refused(lambda: trust.untrusted_code([case]))
    assert "code.py: File too large" in said


def test_code_of_any_size_and_depth_is_looked_at(tmp_path: Path) -> None:
    """It has a digest, or none; Python itself can read no such thing."""
    deep, wide = tmp_path / "deep.py", tmp_path / "wide.py"
    deep.write_text("-" * 200_000 + "1")
    assert code_digest("strategy", f"{deep}:x") != "none"
    too_large(wide)
    assert code_digest("strategy", f"{wide}:x") == "none"
    deep.write_text("import wide\n")
    assert code_digest("strategy", f"{deep}:x") == "none"


def test_a_sparse_trace_is_refused_early(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = sound / "run/traces/case-w2"
    for name in ("index.bin", "slot-000.safetensors"):
        too_large(place / "run-1" / name)
    with pytest.raises(CannotRunError, match=r"needs 2048\.0 GiB of memory and .* are available"):
        read_back._check_memory(place)
    shutil.rmtree(place / "run-1")
    (place / "run-1").mkdir()
    (place / "run-1/index.bin").symlink_to("gone")
    with pytest.raises(UsageError, match="cannot be read"):
        read_back._check_memory(place)


def test_a_report_may_come_by_a_pipe(tmp_path: Path) -> None:
    """As of `distcheck report <(jq ...)`: what is written is read, however late it comes."""
    ours, theirs = os.pipe()
    if os.fork() == 0:
        os.write(theirs, b'{"late": 1}')
        os._exit(0)
    os.close(theirs)
    assert decoding.read_bounded(Path(f"/dev/fd/{ours}")) == b'{"late": 1}'
    os.close(ours)


@pytest.mark.parametrize("number", ["world", "steps"])
def test_a_case_has_no_more_ranks_or_steps_than_lists_can_hold(number: str) -> None:
    data = json.dumps({**zips.CASE, number: 10**9}).encode()
    with pytest.raises(msgspec.ValidationError, match=rf"`\$\.{number}`"):
        decoding.decode_json(data, Case)
    assert decoding.decode_json(json.dumps({**zips.CASE, number: 9}).encode(), Case)
