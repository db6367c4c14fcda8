"""Bundles and cases from elsewhere: nothing outside is read, written or run, and nothing is run
without a yes.
"""

import json
import os
import resource
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from distcheck import private
from distcheck.cli import root_command
from distcheck.errors import UsageError
from distcheck.plan.provenance import provenance_of
from distcheck.records import Case
from distcheck.store import trust, unpacking
from distcheck.store.bundle import open_bundle, read_cases_to_replay
from tests.security import zips
from tests.world.command import COMMAND


@pytest.fixture(autouse=True)
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a person's own, in which `distcheck replay` is called."""
    here = tmp_path / "checkout"
    here.mkdir()
    monkeypatch.chdir(here)
    return here


def refuse(*words: str) -> str:
    """What `distcheck replay` refuses, in one sentence on one line."""
    with pytest.raises(UsageError) as caught:
        root_command.main(["replay", *words], standalone_mode=False)
    sentence = str(caught.value)
    assert len(sentence.splitlines()) == 1
    assert sentence.isprintable()
    return sentence


OUTSIDE: dict[str, dict[str, Any]] = {
    "a case that climbs": {"cases": ["../../../../outside"]},
    "a case that is absolute": {"cases": ["/outside"]},
    "a case that is missing": {"cases": ["other"]},
    "a case named for a folder": {"cases": [".."]},
    "no case": {"cases": []},
}
for name, file in {
    "absolute": "/outside.py", "climbing": "../../../../outside.py", "missing": "sources/x.py",
    "climbing from within": "sources/../../../../../outside.py", "not a source": "bundle.json",
    "a folder": "sources/there", "empty": "",
}.items():  # fmt: skip
    OUTSIDE[f"a source that is {name}"] = {
        "sources": [{**zips.MANIFEST["sources"][0], "file": file}]
    }


@pytest.mark.parametrize("manifest", OUTSIDE.values(), ids=OUTSIDE)
def test_what_a_manifest_names_stays_inside(tmp_path: Path, manifest: dict[str, Any]) -> None:
    case = json.dumps(zips.CASE)
    outside = [tmp_path / "outside.json", tmp_path / "outside.py"]
    outside[0].write_text(case)
    outside[1].write_text(zips.CODE.format(marker=str(tmp_path / "ran")))
    bundle = zips.bundle(tmp_path / "b.zip", **manifest)
    assert "damaged" in (said := refuse(str(bundle), "--trust")) or "holds no cases" in said
    assert outside[0].read_text() == case, "it was read and written again"
    assert not (tmp_path / "ran").exists()


MEMBERS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "absolute": (lambda b: zips.add(b, "/outside.py"), "leads out of the bundle"),
    "climbing": (lambda b: zips.add(b, "sources/../../x.py"), "leads out of the bundle"),
    "another system's": (lambda b: zips.add(b, "sources\\..\\x.py"), "leads out of the bundle"),
    "not plain": (lambda b: zips.add(b, "sources//x.py"), "not written in its plain form"),
    "a dot": (lambda b: zips.add(b, "./x.py"), "not written in its plain form"),
    "a link": (zips.link, "is a link or a special file"),
    "a device": (lambda b: zips.add(b, "sources/d", mode=0o060666), "a special file"),
    "with NUL": (zips.with_nul, "characters that do not print"),
    "with an escape": (lambda b: zips.add(b, "a\x1b[2J"), "characters that do not print"),
    "deep": (lambda b: zips.add(b, "a/" * 500 + "x.py"), "is in more than 32 folders"),
    "long": (lambda b: zips.add(b, "a/" * 20 + "a" * 999), "255 bytes in one part"),
    "long for a file": (lambda b: zips.add(b, "\u00e9" * 128), "255 bytes in one part"),
    "long as a whole": (
        lambda b: zips.add(b, "aaaaaaaaa" * 20 + "/" + ("b" * 200 + "/") * 5),
        "1000 bytes",
    ),
    "twice": (lambda b: zips.add(b, "sources/x.py", twice=True), "is in it more than once"),
    "a file and a folder": (lambda b: zips.add(b, "sources/there"), "is in it more than once"),
    "compiled": (
        lambda b: zips.add(b, "sources/there/__pycache__/sync.cpython-311.pyc"),
        "is compiled code",
    ),
    "encrypted": (zips.encrypted, "is encrypted"),
    "damaged": (zips.damaged, "is damaged or is not a bundle"),
    "cut": (zips.cut, "is damaged or is not a bundle"),
    "overlapping": (zips.overlapping, "is damaged or is not a bundle"),
    "many": (zips.many, "has 20003 members; a bundle has at most 10000"),
}


@pytest.mark.parametrize(("change", "sentence"), MEMBERS.values(), ids=MEMBERS)
def test_members_that_are_refused(
    tmp_path: Path, checkout: Path, change: Callable[[Path], Path], sentence: str
) -> None:
    bundle = change(zips.bundle(tmp_path / "b.zip"))
    assert sentence in refuse(str(bundle), "--trust")
    assert not list(checkout.glob(".distcheck/bundles/*")), "nothing of it stays"
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["bundle.json", "cases/case-w2.json"])
@pytest.mark.parametrize(
    "data", [b"", b"{", b"[" * 100_000, b'{"schema": ' + b"[" * 100_000, b"\xff", b"null", b"{}"]
)  # fmt: skip
def test_files_of_a_bundle_that_cannot_be_read(tmp_path: Path, name: str, data: bytes) -> None:
    files = zips.members(tmp_path / "ran") | {name: data}
    refuse(str(zips.write(tmp_path / "b.zip", files)), "--trust")
    without = {other: text for other, text in files.items() if other != name}
    refuse(str(zips.write(tmp_path / "b.zip", without)), "--trust")


def test_a_manifest_has_a_limit(tmp_path: Path) -> None:
    bundle = zips.bundle(tmp_path / "b.zip", variables={"X": "x" * (2 << 20)})
    assert "bundle.json is larger than 1048576 bytes" in refuse(str(bundle), "--trust")


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))
from pathlib import Path
from distcheck.store.bundle import open_bundle
from distcheck.errors import UsageError
try:
    open_bundle(Path(sys.argv[1]))
except UsageError as error:
    sys.exit(str(error))
"""


@pytest.mark.parametrize("total_bytes", [300 << 20, pytest.param(6 << 30, marks=pytest.mark.sweep)])
def test_a_zip_bomb_is_refused(tmp_path: Path, checkout: Path, total_bytes: int) -> None:
    bundle = zips.bomb(zips.bundle(tmp_path / "b.zip"), total_bytes=total_bytes)
    assert bundle.stat().st_size < total_bytes // 500
    ran = subprocess.run(
        [sys.executable, "-c", LIMITED, str(bundle)], capture_output=True, text=True, check=False
    )
    assert "would unpack to more than 256 MiB" in ran.stderr
    assert len(ran.stderr.splitlines()) == 1
    assert not list(checkout.glob(".distcheck/bundles/*"))


def test_the_limit_is_on_unpacked_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = zips.bundle(tmp_path / "b.zip")
    zips.bomb(bundle, total_bytes=2 << 20, member_bytes=1 << 20)
    monkeypatch.setattr(unpacking, "MOST_BYTES", 3 << 20)
    open_bundle(bundle)
    monkeypatch.setattr(unpacking, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(unpacking, "_check_members", lambda *given: None)
    with pytest.raises(UsageError, match="would unpack to more than 1 MiB"):
        open_bundle(bundle)


def test_links_in_the_way_are_not_followed(tmp_path: Path, checkout: Path) -> None:
    bundle = zips.bundle(tmp_path / "b.zip")
    folder = open_bundle(bundle).folder
    assert folder is not None
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "kept").write_text("kept")
    for there in (folder / "sources", folder):
        trash = tmp_path / f"old-{there.name}"
        there.rename(trash)
        there.symlink_to(victim)
        open_bundle(bundle)
        assert os.listdir(victim) == ["kept"]
        assert not there.is_symlink()


def test_a_bundle_in_use_stays_where_it_is(tmp_path: Path) -> None:
    """Every process of a launcher unpacks it: none takes the files of another away."""
    bundle = zips.bundle(tmp_path / "b.zip")
    folder = open_bundle(bundle).folder
    assert folder is not None
    (file,) = folder.rglob("sync.py")
    before = file.stat().st_ino
    assert open_bundle(bundle).folder == folder
    assert file.stat().st_ino == before
    file.write_text("raise SystemExit('changed since')")
    open_bundle(bundle)
    assert "import torch" in file.read_text(), "the archive's file, not what was left there"


def test_code_of_others_is_named_and_not_run(tmp_path: Path) -> None:
    bundle = zips.bundle(tmp_path / "b.zip")
    said = refuse(str(bundle))
    assert "runs untrusted code: strategy .distcheck/bundles/b-" in said
    (code,) = trust.untrusted_code(*unpacked(bundle))
    assert len(code.digest) == 32
    assert code.digest in said
    assert "pass --trust" in said
    assert not (tmp_path / "ran").exists()
    # Whatever comes with the code changes its digest: it may be imported by any name.
    files = zips.members(tmp_path / "ran") | {"sources/there/other.py": b"x = 1"}
    (other,) = trust.untrusted_code(*unpacked(zips.write(tmp_path / "c.zip", files)))
    assert len(other.files) == 2
    assert other.digest != code.digest


def unpacked(bundle: Path) -> tuple[list[Case], dict[str, str]]:
    replay = read_cases_to_replay(str(bundle))
    return replay.cases, replay.unpacked


def test_the_same_code_of_this_checkout_needs_no_question(tmp_path: Path, checkout: Path) -> None:
    files = zips.members(tmp_path / "ran")
    mine = checkout / "sync.py"
    mine.write_bytes(files["sources/there/sync.py"])
    spec = f"{mine}:sync"
    case = {**zips.CASE, "strategy": spec}
    source = {**zips.MANIFEST["sources"][0], "spec": spec}
    files |= {
        "bundle.json": json.dumps({**zips.MANIFEST, "sources": [source]}).encode(),
        "cases/case-w2.json": json.dumps(case).encode(),
    }
    bundle = zips.write(tmp_path / "b.zip", files)
    assert trust.untrusted_code(*unpacked(bundle)) == []
    more = zips.write(tmp_path / "c.zip", {**files, "sources/there/random.py": b"x = 1"})
    assert len(trust.untrusted_code(*unpacked(more))) == 1, "a module that this checkout lacks"
    mine.write_text("changed = 1")
    assert len(trust.untrusted_code(*unpacked(bundle))) == 1


def case_of(**changes: Any) -> Case:
    return Case(**{"id": "c", "strategy": "ddp", "world": 2, "workload": "mlp", **changes})


def test_known_or_asked(tmp_path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (checkout / "mine.py").write_text("def f(model): ...")
    (checkout / ".venv/lib/site-packages").mkdir(parents=True)
    (checkout / ".venv/lib/site-packages/far.py").write_text("")
    (tmp_path / "theirs.py").write_text("")
    (checkout / "link.py").symlink_to(tmp_path / "theirs.py")
    known = [
        {}, {"strategy": "mine.py:f"}, {"strategy": str(checkout / "mine.py:f")},
        {"workload": "exact"}, {"workload": "generated:seed=1"}, {"workload": "tied_weights"},
        {"workload": "distcheck.workloads.mlp:MLP"},
        {"adaptation": {"arguments": [["x", "@group"], ["y", "1"]]}},
    ]  # fmt: skip
    asked = [
        {"strategy": "../theirs.py:f"}, {"strategy": str(tmp_path / "theirs.py:f")},
        {"strategy": "link.py:f"}, {"strategy": "subprocess:run"}, {"workload": "os:system"},
        {"strategy": ".venv/lib/site-packages/far.py:f"}, {"backend": "subprocess:run"},
        {"adaptation": {"arguments": [["x", "@os:system"]]}},
        {"adaptation": {"variables": [["x", "@os:system"]]}},
    ]  # fmt: skip
    for wanted, cases in ((0, known), (1, asked)):
        for changes in cases:
            case = msgspec.convert(msgspec.to_builtins(case_of(**changes)), Case)
            made = {"c": provenance_of(case, {})}
            assert len(trust.untrusted_code([case], {}, made=made)) == wanted, changes
    mine = case_of(strategy="mine.py:f")
    made = {"c": provenance_of(mine, {})}
    assert len(trust.untrusted_code([mine], {})) == 1, "no digest was recorded"
    monkeypatch.setenv("HOME", str(checkout))
    assert len(trust.untrusted_code([mine], {}, made=made)) == 1, "downloads lie there"


def test_a_yes_on_a_terminal_is_asked_for(tmp_path: Path) -> None:
    """On a real one: the console script between the two ends of a pseudo-terminal."""
    bundle = zips.bundle(tmp_path / "b.zip")
    ours, theirs = os.openpty()
    child = subprocess.Popen(
        [*COMMAND, "replay", str(bundle)], stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    os.write(ours, b"n\n")
    said = b""
    try:
        while piece := os.read(ours, 4096):
            said += piece
    except OSError:  # how a terminal ends
        pass
    os.close(ours)
    assert child.wait() == 2
    text = said.decode()
    assert "Run it? [y/N]:" in text
    assert "SHA-256" in text
    assert "was not run; pass --trust" in text
    assert not (tmp_path / "ran").exists()


@pytest.mark.sweep
def test_with_trust_it_runs(tmp_path: Path, checkout: Path) -> None:
    bundle = zips.bundle(tmp_path / "b.zip")
    ran = subprocess.run(
        [*COMMAND, "replay", str(bundle), "--trust"], capture_output=True, text=True, check=False
    )
    assert ran.returncode in (0, 5), ran.stderr
    assert (tmp_path / "ran").exists()


def test_a_case_file_has_a_limit(tmp_path: Path) -> None:
    (tmp_path / "case.json").write_bytes(b" " * (17 << 20))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "it is larger than 16 MiB" in refuse(str(tmp_path / "case.json"))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10
    assert not zipfile.is_zipfile(tmp_path / "case.json")


def test_folders_of_many_members_are_checked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of a folder lists its files."""
    more = {f"sources/there/m{number}.py": b"" for number in range(500)}
    bundle = zips.write(tmp_path / "b.zip", {**zips.members(tmp_path / "ran"), **more})
    checked: list[Path] = []
    real = private._is_own_and_empty
    monkeypatch.setattr(
        private, "_is_own_and_empty", lambda path: checked.append(path) or real(path)
    )
    open_bundle(bundle)
    assert len(checked) < 50
