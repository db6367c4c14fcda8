"""Damaged files: every reader answers with a clear error or a right acceptance.

A failure prints the seed of its mutation and the folder with the damaged files;
`run_one("merge", 17, ...)` repeats it. Seeds are fixed here; those of the sweep go on from there.
"""

import contextlib
import re
import shutil
import traceback
from pathlib import Path

import pytest

import distcheck
from distcheck.errors import ExitCode
from distcheck.reports.json_report import render
from distcheck.store.bundle import make_bundle
from distcheck.worlds.pool import Pool
from tests.documents import crash, document, mismatch, passing
from tests.fuzz import readers
from tests.fuzz.mutations import Draw
from tests.fuzz.readers import READERS, Answer, BrokenError, Originals
from tests.sealing import seal_again
from tests.unit.gate_documents import CRASHED, FAILED, PASSED, UNKNOWN, document_of
from tests.world import warm

SYNC = """
import torch.distributed as dist

def right(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()

def wrong(model):
    pass
"""
CONFIG = """
strategies = ["ddp", "sync.py:right"]
worlds = [2, 4]
workloads = ["exact", "mlp"]
backends = ["gloo"]
dtypes = ["float32"]
seeds = [0, 1]
batch = 64
steps = 2
deadline_s = 10.5
data = "synthetic"
device = "cpu"
loss = "mean"
separate = false

[strategy."sync.py:right"]
worlds = [3]
arg = { average = true }
as = "model"
"""
CODES = {int(code) for code in ExitCode}
PER_READER = 200 // len(READERS) + 1
IN_SWEEP = 2_000 // len(READERS) + 1


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Originals:
    folder = tmp_path_factory.mktemp("originals")
    (folder / "sync.py").write_text(SYNC)
    (folder / "matrix.toml").write_text(CONFIG)
    run = folder / "run"
    report = distcheck.verify(
        [f"{folder}/sync.py:right", f"{folder}/sync.py:wrong"],
        world=2, workload="mlp", dtype="float32", batch=8, steps=2, separate=False, save=run,
    )  # fmt: skip
    assert [case.verdict for case in report.cases] == ["pass", "fail"]
    with contextlib.chdir(folder):  # only code of this checkout is packed
        make_bundle(run, folder / "run.zip", traces=False)
    return Originals(run, folder / "run.zip", _parts(folder), folder / "matrix.toml")


def _parts(folder: Path) -> tuple[Path, Path]:
    """A document with all that a report may hold, as part 1, and a short one that failed."""
    found = []
    everything = (PASSED, FAILED, CRASHED, UNKNOWN, passing(), mismatch(), crash())
    for shard, cases in ((1, everything[::2]), (2, everything[1::2])):
        part = document_of(*cases, shard=shard, shards=2, plan=everything)
        part["since_green"] = document(passing())["since_green"]
        path = folder / f"part-{shard}.json"
        path.write_text(render(part))
        found.append(path)
    return found[0], found[1]


def run_one(reader: str, number: int, originals: Originals, folder: Path) -> Answer:
    """Apply one mutation and read the result; raise any exception that is not a message for a
    person. The damaged files of a mutation that raises are kept in `folder`.
    """
    place = folder / f"{reader}-{number}"
    place.mkdir()
    with readers.bounded():
        answer = READERS[reader](originals, place, Draw(f"{reader} {number}"))
    if answer.code not in CODES or "\n" in answer.said.strip("\n"):
        raise BrokenError(f"exit code {answer.code}: {answer.said}")
    shutil.rmtree(place)
    return answer


def broken_of(reader: str, numbers: range, originals: Originals, folder: Path) -> list[str]:
    found = []
    refused = 0
    for number in numbers:
        try:
            refused += run_one(reader, number, originals, folder).code == ExitCode.USAGE
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(last.filename).name}:{last.lineno}"
            kept = folder / f"{reader}-{number}"
            found.append(
                f"seed '{reader} {number}': {type(error).__name__}: {str(error)[:150]} ({where}); "
                f"damaged files: {kept}"
            )
    if reader != "earlier":  # which leaves out what it cannot read
        assert refused > len(numbers) // 4, "most damage is to be refused"
    return found


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distcheck.store.run_folder.run_job", readers.load_here)


@pytest.mark.parametrize("reader", READERS)
def test_damage_is_refused(reader: str, here: None, originals: Originals, tmp_path: Path) -> None:
    broken = broken_of(reader, range(PER_READER), originals, tmp_path)
    assert not broken, "\n".join(broken)


@pytest.mark.sweep
@pytest.mark.parametrize("reader", READERS)
def test_much_damage_refused(reader: str, here: None, originals: Originals, tmp_path: Path) -> None:
    broken = broken_of(reader, range(PER_READER, IN_SWEEP), originals, tmp_path)
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 10**400])
def test_a_number_too_large(number: int, here: None, originals: Originals, tmp_path: Path) -> None:
    """JSON has numbers of any size; the trace is read in a process that is sent 64 bits."""
    place = readers._copied_traces(originals, tmp_path)
    about = place / "about.json"
    changed = re.sub(rb'"shape":\[\d+', b'"shape":[%d' % number, about.read_bytes())
    assert changed != about.read_bytes()
    about.write_bytes(changed)
    seal_again(place)
    answer = readers.answer_of(lambda: readers._load(place))
    assert answer.code == ExitCode.USAGE
    assert "is damaged" in answer.said


@pytest.mark.sweep
def test_edited_traces_cause_no_crash(pool: Pool, originals: Originals, tmp_path: Path) -> None:
    broken = []
    for number in range(100):
        place = tmp_path / str(number)
        try:
            answer = readers.rejudged(originals, place, Draw(number), pool)
            assert answer.code in CODES
        except Exception as error:
            broken.append(f"{number}: {type(error).__name__}: {error}")
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("words", "file", "damage"),
    [
        (("report", "part-1.json", "--html", "out.html"), "part-1.json", ('"checks"', '"Checks"')),
        (("merge", "part-1.json", "part-2.json"), "part-2.json", ('"index": [', '"index": [[')),
        (("replay", "run/cases/{case}.json"), "run/cases/{case}.json", ('d": 2,', 'd": 9e99,')),
        (("replay", "run.zip"), "run.zip", ("PK", "QK")),
        (("bundle", "run"), "run/cases/{case}.json", ('"id"', '"\\ud8')),
        (("recheck", "run"), "run/traces/{case}/about.json", ("sync-right", "sync-wrong")),
        (("recheck", "run"), "run/traces/{case}/checksums.json", ('"', "")),
        (("compare", "run", "run"), "run/traces/{case}/run-1/index.bin", ("\x00\x00", "\x00\x01")),
        (("verify", "--config", "matrix.toml"), "matrix.toml", ("[2, 4]", "[2, {}]")),
        (("plan", "--config", "matrix.toml"), "matrix.toml", ("batch = 64", "b = " + "[" * 9999)),
    ],
)  # fmt: skip
def test_commands_end_in_one_sentence(
    words: tuple[str, ...], file: str, damage: tuple[str, str], originals: Originals, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(originals.run.parent, folder)
    case = next((folder / "run" / "traces").iterdir()).name
    path = folder / file.format(case=case)
    content = path.read_bytes()
    before, after = (text.encode("latin-1") for text in damage)
    assert before in content
    path.write_bytes(content.replace(before, after))
    ran = warm.run(*(word.format(case=case) for word in words), cwd=folder)
    assert ran.returncode == 2, ran.stdout + ran.stderr
    assert "Traceback" not in ran.stderr + ran.stdout
    assert ran.stderr.startswith("distcheck: ")
    assert ran.stderr.count("\n") == 1
