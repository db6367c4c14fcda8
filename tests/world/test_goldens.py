"""Runs compared with later ones, bundled, and replayed where something has changed."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

import distcheck
from distcheck.compare.command import compare_command
from distcheck.errors import CannotRunError, UsageError
from distcheck.store.bundle import make_bundle, read_cases_to_replay
from distcheck.store.run_folder import RunStore
from tests.sealing import rewrite_about
from tests.waiting import wait_until
from tests.world.command import COMMAND, Run, complaints
from tests.world.warm import distcheck as command

__all__ = ["command"]
pytestmark = pytest.mark.usefixtures("kept_pool")

MEAN = """
import torch.distributed as dist

def mean(p):
    dist.all_reduce(p.grad)
    p.grad {scale}
"""

SYNC = """
from my_lib import mean

def sync(model):
    for p in model.parameters():
        mean(p)
"""

WORKLOAD = """
from distcheck.workloads.mlp import MLP

class Own(MLP):
    def __init__(self):
        super().__init__(64)

    def loss(self, model, batch):
        return super().loss(model, batch) * {factor}
"""

WAITS = """
import time

def sync(model):
    open({asleep!r}, "w").close()
    time.sleep(1000)
"""

SECRET = "hunter2-of-the-colleague"


def write_code(folder: Path, *, scale: str = "/= 3", factor: float = 1.0) -> None:
    (folder / "my_lib.py").write_text(MEAN.format(scale=scale))
    (folder / "my_sync.py").write_text(SYNC)
    (folder / "my_load.py").write_text(WORKLOAD.format(factor=factor))


def record(folder: Path, to: str, *, scale: str = "/= 3", factor: float = 1.0, **asked: int) -> str:
    """A run of three ranks with equal shards, in which only the given code differs."""
    write_code(folder, scale=scale, factor=factor)
    distcheck.verify(
        f"{folder}/my_sync.py:sync", world=3, workload=f"{folder}/my_load.py:Own", dtype="float32",
        batch=asked.get("batch", 96), seed=asked.get("seed", 0), steps=2, separate=False,
        save=folder / to,
    )  # fmt: skip
    return str(folder / to)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    record(folder, "golden")
    return folder


@pytest.fixture
def golden(recorded: Path) -> Path:
    """A folder with the run `golden` in it, and its code as it was then."""
    write_code(recorded)
    return recorded


def compare(then: Path | str, now: str | None, tmp_path: Path, *, bits: bool = False) -> dict:  # type: ignore[type-arg]
    """The comparison as JSON, with the exit code in it."""
    file = tmp_path / "comparison.json"
    code = compare_command(
        str(then), now, bits=bits, files={"json": str(file)}, trusted=True, quiet=False
    )
    document = json.loads(file.read_text())
    assert document["schema"] == "distcheck.comparison/1"
    return {**document, "code": code}


def test_unchanged_code(golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = compare(golden / "golden", None, tmp_path, bits=True)
    (case,) = found["cases"]
    assert (found["code"], case["verdict"], case["bits"]) == (0, "pass", "same")
    kinds = {moment["kind"]: moment["tensors"] for moment in case["found"]["moments"]}
    assert kinds["gradients"] == kinds["local gradients"] == 6 * 3 * 2
    assert kinds["initial state"] == 2 * 6 * 3
    assert kinds["loss"] == 3 * 2
    assert "all bits are identical" in capsys.readouterr().out


def test_another_order_of_rounding_is_within(golden: Path, tmp_path: Path) -> None:
    later = record(golden, str(tmp_path / "later"), scale="*= 1 / 3")
    found = compare(golden / "golden", later, tmp_path)
    (case,) = found["cases"]
    assert (found["code"], case["bits"]) == (0, "changed")
    assert case["found"]["kind"] == "gradients"
    assert case["found"]["first"]["step"] == 0
    assert case["found"]["judged"] > 0
    assert case["found"]["beyond"] is None
    assert 0 < case["found"]["drift"][1] < 1e-6
    (change,) = case["changes"]
    assert change["kind"] == "code", "a module beside the strategy's counts as its code"
    assert compare(golden / "golden", later, tmp_path, bits=True)["code"] == 1


@pytest.mark.parametrize(
    ("changed", "kind"),
    [({"scale": "/= 3.0001"}, "gradients"), ({"factor": 1.0001}, "loss")],
    ids=["exchange", "backward"],
)
def test_one_in_10000(golden: Path, tmp_path: Path, changed: dict[str, object], kind: str) -> None:
    """In the exchange, and in the backward pass, which alone can bring it to the bounds of local
    gradients and of loss: the later run trains correctly, on another loss.
    """
    later = record(golden, str(tmp_path / "later"), **changed)  # type: ignore[arg-type]
    found = compare(golden / "golden", later, tmp_path)
    (case,) = found["cases"]
    assert (found["code"], case["verdict"], case["found"]["kind"]) == (1, "fail", kind)
    assert "the difference is larger than between two correct runs" in case["reason"]
    assert case["found"]["beyond"]["error"] > case["found"]["beyond"]["bound"] > 0
    if kind == "loss":
        assert {m["kind"] for m in case["found"]["moments"] if m["changed"]} > {"local gradients"}
        report = json.loads((Path(later) / "report.json").read_text())
        assert report["verdict"] == "pass", "nothing else tells"


def test_what_cannot_be_compared_is_unknown(golden: Path, tmp_path: Path) -> None:
    later = record(golden, str(tmp_path / "later"), seed=1)
    found = compare(golden / "golden", later, tmp_path)
    assert found["code"] == 5
    assert "the cases differ: seed was 0, but is 1" in found["cases"][0]["reason"]

    shutil.copytree(golden / "golden", tmp_path / "fewer")
    traces = tmp_path / "fewer" / "traces"
    (name,) = (place.name for place in traces.iterdir())
    (traces / name).rename(traces / "other")
    with pytest.raises(UsageError, match="is of case"):
        compare(golden / "golden", str(tmp_path / "fewer"), tmp_path)
    rewrite_about(traces / "other", lambda text: text.replace(f'"id":"{name}"', '"id":"other"'))
    found = compare(golden / "golden", str(tmp_path / "fewer"), tmp_path)
    assert found["code"] == 5
    assert sorted(case["verdict"] for case in found["cases"]) == ["unknown", "unknown"]


@pytest.mark.parametrize(
    ("report", "case", "sentence"),
    [
        ('{"schema": "distcheck.report/1"}', {}, "is damaged: Object missing .* `verdict`"),
        ('{"schema": "distcheck.report/1", "cases": [{}]}', {}, "is damaged: Object missing"),
        ("[" * 10_000, {}, "is not a report that --json wrote"),
        ('{"schema": ' + "[" * 10_000, {}, "is not a report that --json wrote"),
        ("", {"id": "../x"}, "is of case ../x; the name of its folder"),
        ("", {"world": -1}, r"is damaged: Expected `int` >= 1 - at `\$\.case\.world`"),
    ],
)
def test_a_damaged_run_is_told_before_anything_runs(
    golden: Path, tmp_path: Path, report: str, case: dict[str, object], sentence: str
) -> None:
    shutil.copytree(golden / "golden", tmp_path / "run")
    if report:
        (tmp_path / "run" / "report.json").write_text(report)
        with pytest.raises(UsageError, match=sentence):
            make_bundle(tmp_path / "run", tmp_path / "run.zip", traces=False)
    (about,) = tmp_path.glob("run/traces/*/about.json")
    told = json.loads(about.read_text())
    edited = json.dumps({**told, "case": {**told["case"], **case}})
    rewrite_about(about.parent, lambda _: edited)
    with pytest.raises(UsageError, match=sentence):
        compare_command(
            str(tmp_path / "run"), None, bits=False, files={}, trusted=True, quiet=False
        )
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_bits_of_another_machine_are_not_held_against_it(golden: Path, tmp_path: Path) -> None:
    later = record(golden, str(tmp_path / "later"), scale="*= 1 / 3")
    (file,) = (Path(later) / "traces").glob("*/about.json")
    about = json.loads(file.read_text())
    about["environment"]["cpu"] = "Another CPU"
    rewrite_about(file.parent, lambda _: json.dumps(about))
    found = compare(golden / "golden", later, tmp_path, bits=True)
    assert found["code"] == 5
    assert (
        "results may not be bit-identical across machines: cpu was" in found["cases"][0]["reason"]
    )
    assert compare(golden / "golden", later, tmp_path)["code"] == 0, "bounds hold anywhere"


def test_record_and_compare_as_commands(command: Run, tmp_path: Path) -> None:
    quick = ("--workload", "mlp:small", "--dtype", "float32", "--world", "2", "--steps", "1",
             "--no-separate")  # fmt: skip
    ran = command("record", "golden", "--strategy", "bad.py:good", *quick)
    assert ran.returncode == 0, ran.stderr
    again = command("compare", "golden", "--junit", "c.xml", "--html", "c.html", "--github")
    assert 'tests="1" failures="0" errors="0"' in (tmp_path / "c.xml").read_text()
    assert "bits same" in (tmp_path / "c.html").read_text()
    assert (again.returncode, complaints(again.stderr)) == (0, [])
    assert "bits same" in again.stdout
    saved = again.stdout.rpartition("saved: ")[2].strip()
    assert list((tmp_path / saved).glob("traces/*/run-1")), "the second run is kept whole"
    for words, sentence in (
        (("compare", "nowhere"), "record, verify --save or job --save wrote"),
        (("compare", "."), "holds no traces"),
        (("record", "--strategy", "ddp"), "the first argument of record must be the folder"),
        (("record", "other", "--strategy", "ddp", "--save", "x"), "remove --save"),
        (("bundle", "nowhere"), "nowhere holds no cases"),
        (("replay", "fake.zip"), "fake.zip is not a bundle of distcheck"),
    ):
        with zipfile.ZipFile(tmp_path / "fake.zip", "w") as archive:
            archive.writestr("bundle.json", "{}")
        refused = command(*words)
        assert refused.returncode == 2, words
        assert sentence in refused.stderr
        assert len(refused.stderr.splitlines()) == 1


def test_a_golden_of_digests(command: Run, tmp_path: Path) -> None:
    """A few kilobytes show whether bits are the same and where they change first; not by how much,
    so that a change that tensors show to be within the bound is unknown.
    """
    (tmp_path / "my_lib.py").write_text(MEAN.format(scale="/= 3"))
    (tmp_path / "my_sync.py").write_text(SYNC)
    words = ("--strategy", "my_sync.py:sync", "--workload", "mlp:small", "--dtype", "float32",
             "--batch", "96", "--world", "3", "--steps", "1", "--no-separate")  # fmt: skip
    for name, digests in (("whole", ()), ("golden", ("--digests",))):
        ran = command("record", name, *digests, *words)
        assert ran.returncode == 0, ran.stderr
    assert not list((tmp_path / "golden").rglob("*.safetensors"))
    size = sum(path.stat().st_size for path in (tmp_path / "golden").rglob("*") if path.is_file())
    assert size < 150_000
    same = command("compare", "golden", "--bits", "-q")
    assert (same.returncode, "bits same; all bits are identical" in same.stdout) == (0, True)

    (tmp_path / "my_lib.py").write_text(MEAN.format(scale="*= 1 / 3"))
    changed = command("compare", "golden", "--trust")
    assert changed.returncode == 5, changed.stdout
    to_do = "to measure it, record the earlier run without --digests, on its machine"
    assert to_do in " ".join(changed.stdout.split())
    first = r"first   gradients: step 0, \S+, rank 0: was digest [0-9a-f]{8}, is digest [0-9a-f]{8}"
    assert re.search(first, changed.stdout)
    assert "drift" not in changed.stdout
    later = changed.stdout.rpartition("saved: ")[2].strip()
    assert command("compare", "golden", later, "--bits", "-q").returncode == 1
    assert command("compare", "whole", later, "-q").returncode == 0, "tensors show the distance"
    backwards = command("compare", later, "golden", "-q")
    assert "record the later run without --digests" in backwards.stdout

    (tmp_path / "my_lib.py").write_text(MEAN.format(scale="/= 3"))
    rechecked = command("recheck", "golden")
    assert (rechecked.returncode, len(complaints(rechecked.stderr))) == (2, 1)
    assert "has digests but no tensors, which judging needs" in rechecked.stderr
    bundled = command("bundle", "golden", "--traces", "-o", "golden.zip")
    assert "golden has digests but no tensors" in bundled.stderr
    refused = command("verify", *words, "--digests")
    assert refused.returncode == 2
    assert "--digests is an option of distcheck record" in refused.stderr


DRIFTED = """
import pathlib, torch
from distcheck.workloads.mlp import MLP

class Drifted(MLP):
    def __init__(self):
        super().__init__(64)

    def model(self, **about):
        model = super().model(**about)
        if pathlib.Path("upgraded").exists():
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1 + 2**-22)
        return model
"""


def test_the_initial_state_is_that_of_the_record(command: Run, tmp_path: Path) -> None:
    """Two recorded runs of it cannot be compared; a run from the recorded state can."""
    (tmp_path / "drifted.py").write_text(DRIFTED)
    words = ("--strategy", "bad.py:good", "--workload", "drifted.py:Drifted", "--dtype", "float32",
             "--world", "2", "--steps", "1", "--no-separate")  # fmt: skip
    assert command("record", "golden", *words).returncode == 0
    (tmp_path / "upgraded").touch()
    assert command("record", "later", *words).returncode == 0
    apart = command("compare", "golden", "later")
    assert apart.returncode == 5
    assert "the runs differ in their initial state" in " ".join(apart.stdout.split())
    again = command("compare", "golden")
    assert again.returncode == 0, again.stdout
    assert "bits same; all bits are identical" in again.stdout


def test_no_folder_of_a_kill(golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while the second run trains: what there is of it is where every run is."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scratch").mkdir()
    try:
        (golden / "my_sync.py").write_text(WAITS.format(asleep=str(tmp_path / "asleep")))
        front = subprocess.Popen(
            [*COMMAND, "compare", str(golden / "golden"), "--trust"],
            env={**os.environ, "TMPDIR": str(tmp_path / "scratch")},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        wait_until((tmp_path / "asleep").exists)
        family = psutil.Process(front.pid).children(recursive=True)
        front.kill()
        front.wait()
    finally:
        (golden / "my_sync.py").write_text(SYNC)
    assert len(family) >= 4, "the helper and three ranks"
    assert psutil.wait_procs(family, timeout=30)[1] == []
    assert not [name for name in os.listdir(tmp_path / "scratch") if "distcheck" in name]
    assert len(list(tmp_path.glob(".distcheck/runs/*/cases/*.json"))) == 1


def test_a_second_run(golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among the last ten, of which it pushes out none that it is to be compared with."""
    monkeypatch.chdir(tmp_path)
    runs = Path(".distcheck/runs")
    for number in range(12):
        (runs / f"0000-{number:02}-0" / "traces").mkdir(parents=True)
    store = RunStore.of_own(keep_everything=True, spare=runs / "0000-00-0" / "traces")
    kept = sorted(path.name for path in runs.iterdir())
    assert kept == ["0000-00-0", *(f"0000-{n:02}-0" for n in range(3, 12)), store.folder.name]

    shutil.rmtree(".distcheck")
    Path(".distcheck").touch()
    with pytest.raises(CannotRunError, match=r"cannot be written: .*; save elsewhere, or work in"):
        compare_command(
            str(golden / "golden"), None, bits=False, files={}, trusted=True, quiet=False
        )


def test_a_bundle_is_atomic(golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import os, pathlib, sys, zipfile; from distcheck.store.bundle import make_bundle\n"
        "zipfile.ZipFile.write = lambda *given: os.kill(os.getpid(), 9)\n"
        "make_bundle(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), traces=True)"
    )
    words = [sys.executable, "-c", program, str(golden / "golden"), str(tmp_path / "run.zip")]
    monkeypatch.chdir(golden)
    assert subprocess.run(words, check=False).returncode == -9
    assert os.listdir(tmp_path) == []

    # Where a file system has no files without a name, as NFS, a draft has a random one: that of
    # another process, or another user, is neither used nor removed.
    opens = os.open

    def without_nameless(path: str, flags: int, *mode: int, **named: Any) -> int:
        if flags & os.O_TMPFILE != os.O_TMPFILE:
            return opens(path, flags, *mode, **named)
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    whole = tmp_path / "run.zip"
    make_bundle(golden / "golden", whole, traces=True)
    (tmp_path / ".run.zip.draft").write_text("of one that was killed")
    make_bundle(golden / "golden", whole, traces=True)
    (tmp_path / ".run.zip.draft").write_text("of one that was killed")
    monkeypatch.setattr(os, "open", without_nameless)
    make_bundle(golden / "golden", whole, traces=True)
    assert sorted(os.listdir(tmp_path)) == [".run.zip.draft", "run.zip"]
    assert zipfile.ZipFile(whole).testzip() is None
    (tmp_path / "notes.txt").write_text("of a person")
    with pytest.raises(UsageError, match=r"notes.txt exists and is not a zip"):
        make_bundle(golden / "golden", tmp_path / "notes.txt", traces=True)


def test_a_bundle_is_replayed_elsewhere(
    golden: Path, tmp_path: Path, command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(golden, str(tmp_path / "unused"))
    monkeypatch.setenv("MY_TOKEN", SECRET)
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    zipped = tmp_path / "run.zip"
    monkeypatch.chdir(golden)
    manifest, remarks = make_bundle(golden / "golden", zipped, traces=False)
    assert remarks == []
    assert manifest.variables["NCCL_ALGO"] == "Ring"
    with zipfile.ZipFile(zipped) as archive:
        names = archive.namelist()
        text = b"".join(archive.read(name) for name in names)
    assert sum(name.endswith("/my_lib.py") for name in names) == 1
    assert SECRET.encode() not in text
    assert b"executable" not in text
    assert not set(os.environ) & {"MY_TOKEN"} & set(manifest.variables)

    ran = command("replay", "run.zip", "--trust", "--json", "report.json")
    assert ran.returncode == 0, ran.stderr
    (case,) = json.loads((tmp_path / "report.json").read_text())["cases"]
    assert case["strategy_file"].startswith(str(tmp_path / ".distcheck"))
    assert not [note for note in case["notes"] if "since this case was saved" in note]


def test_changes_are_named(tmp_path: Path, command: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Path(record(tmp_path, "run"))
    (file,) = (run / "cases").iterdir()
    # Of another size: within a second, Python tells by that which bytecode is old.
    (tmp_path / "my_lib.py").write_text(MEAN.format(scale="/= 2.0"))
    saved = json.loads(file.read_text())
    saved["made"]["environment"]["torch"] = "1.0"
    file.write_text(json.dumps(saved))
    words = ["replay", str(run), "--json", "report.json"]  # all its cases: one
    assert "sync.py and 1 more, SHA-256" in command(*words).stderr, "it asks again"
    ran = command(*words, "--trust")
    assert ran.returncode == 1, ran.stderr
    (case,) = json.loads((tmp_path / "report.json").read_text())["cases"]
    (note,) = (note for note in case["notes"] if "since this case was saved" in note)
    assert f"the code of strategy {tmp_path}/my_sync.py:sync has changed" in note
    assert "torch was 1.0 and is " in note
    monkeypatch.chdir(tmp_path)
    _, remarks = make_bundle(run, tmp_path / "late.zip", traces=True)
    assert "has changed since the run; the bundle contains the current version" in remarks[0]
    saved["made"]["seal"] = "0" * 64  # of another user
    file.write_text(json.dumps(saved))
    with pytest.raises(UsageError, match="not the code that the run recorded"):
        make_bundle(run, tmp_path / "late.zip", traces=True)


def test_a_bundle_writes_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    manifest = {"schema": "distcheck.bundle/1", "distcheck": "0", "cases": [], "sources": [],
                "variables": {}}  # fmt: skip
    for name, sentence in (("../evil.py", "leads out of the bundle"), ("", "the schema")):
        with zipfile.ZipFile("bad.zip", "w") as archive:
            archive.writestr("bundle.json", msgspec.json.encode({**manifest, "schema": "x"}))
            if name:
                archive.writestr(name, "evil")
        with pytest.raises(UsageError, match=sentence):
            read_cases_to_replay("bad.zip")
    assert not (tmp_path.parent / "evil.py").exists()
