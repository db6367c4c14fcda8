"""The front of a matrix on an engine: what becomes of tasks that come back, are lost, or lie."""

import importlib.util
import json
import socket
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distcheck import private
from distcheck.addons.engines import on_ray, on_slurm
from distcheck.addons.engines.running import Ended, LostPart, MatrixTask, run_on
from distcheck.errors import CannotRunError, ExitCode, UsageError
from distcheck.plan.matrix import Planned
from distcheck.records import RunPlan
from tests.unit.gate_documents import FAILED, PASSED, case_report, document_of

REPORTS = (PASSED, FAILED, case_report("fsdp", "pass", world=4))
TYPED = ["distcheck", "verify", "--strategy", "ddp", "--on", "slurm", "-q", "--json", "whole.json"]


class Made:
    """An engine whose tasks have ended already, as `ends` says it by the number of the part."""

    code = "there"

    def __init__(self, work: Sequence[MatrixTask], ends: dict[int, Any]) -> None:
        self.work, self.ends, self.closed = work, ends, False

    def ended(self) -> Iterator[tuple[MatrixTask, Ended | LostPart]]:
        for one in self.work:
            end = self.ends[one.number]
            if isinstance(end, BaseException):
                raise end
            yield one, end

    def close(self) -> None:
        self.closed = True


def plan(part: str | None) -> Planned:
    cases = [report.case for report in REPORTS]
    shards = len(cases) if part else 1
    whole = RunPlan(
        digest="d", shard=1 if part else 0, shards=shards, cases=tuple(cases),
        assigned={case.id: n for n, case in enumerate(cases, start=1)},
    )  # fmt: skip
    return Planned(cases=cases[:1], every=cases, whole=whole, file="")


def ended(number: int, **said: Any) -> Ended:
    document = document_of(
        REPORTS[number - 1], shard=number, shards=len(REPORTS), plan=REPORTS, **said
    )
    return document["exit_code"], json.dumps(document), ""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs the three parts with these ends; the exit code, the document and the engine."""
    monkeypatch.setattr(sys, "argv", TYPED)
    monkeypatch.chdir(tmp_path)

    def run(**ends: Any) -> tuple[int, dict[str, Any], Made]:
        started: list[Made] = []

        def start(address: str, work: Sequence[MatrixTask]) -> Made:
            started.append(Made(work, {int(name[1:]): end for name, end in ends.items()}))
            return started[0]

        monkeypatch.setattr(on_slurm, "start", start)
        file = tmp_path / "whole.json"
        code = run_on("slurm", plan, files={"json": str(file)}, quiet=True)
        return code, json.loads(file.read_text()), started[0]

    return run


def test_reports_that_come_back_are_one(run: Any) -> None:
    code, whole, engine = run(_1=ended(1), _2=ended(2), _3=ended(3))
    assert code == ExitCode.MISMATCH
    assert [case["verdict"] for case in whole["cases"]] == ["pass", "fail", "pass"]
    assert engine.closed
    first, *_, last = engine.work
    assert first.words == ("--strategy", "ddp", "--shard", "1/3")
    assert (last.name, last.ranks, last.gpus) == ("fsdp, 4 ranks", 4, 0)


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (LostPart("Ray lost its task: OOM"), "Ray lost its task: OOM"),
        ((2, "", "x\ndistcheck: no such file\n\n"), "its distcheck exited with code 2: dis"),
        ((137, "", ""), "its distcheck exited with code 137: nothing"),
        (ended(3, digest="e"),
         "it has a different plan: its files or versions differ from those here"),
        ((0, '{"schema": "distcheck.report/1", "verdict": "pass"}', ""), ""),
        ((0, "[" * 100_000, ""), ""),
    ],
    ids=["lost", "refused", "killed", "another plan", "forged", "deep"],
)  # fmt: skip
def test_a_part_without_its_report_is_unknown_with_the_reason(
    run: Any, end: Any, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, whole, _ = run(_1=ended(1), _2=ended(1), _3=end)
    assert [case["verdict"] for case in whole["cases"]] == ["pass", "unknown", "unknown"]
    assert code == ExitCode.UNKNOWN
    (note,) = whole["cases"][2]["notes"]
    assert note.startswith(f"planned in part 3 of 3, but in no report: {why}")
    assert f"part 3 of 3 is unknown: {why}" in capsys.readouterr().err


def test_what_another_part_says_of_a_case_does_not_count(run: Any) -> None:
    """A worker that answers for others cannot make them green."""
    green = [case_report(r.case.strategy, "pass", world=r.case.world) for r in REPORTS]
    forged = document_of(*green, shard=1, shards=3, plan=REPORTS)
    code, whole, _ = run(_1=(0, json.dumps(forged), ""), _2=ended(2), _3=ended(3))
    assert [case["verdict"] for case in whole["cases"]] == ["unknown", "fail", "pass"]
    assert (
        "the report is part 1, but has case 'sync.py:f-w2' of part 2"
        in whole["cases"][0]["notes"][0]
    )
    assert code == ExitCode.MISMATCH


def test_ctrl_c_ends_the_tasks_and_shows_what_there_is(run: Any) -> None:
    code, whole, engine = run(_1=ended(1), _2=KeyboardInterrupt(), _3=None)
    assert code == ExitCode.INTERRUPTED
    assert engine.closed
    assert [case["verdict"] for case in whole["cases"]] == ["pass", "unknown", "unknown"]
    assert "interrupted before it finished" in whole["cases"][1]["notes"][0]


def test_nothing_that_came_back_is_no_verdict(run: Any) -> None:
    with pytest.raises(CannotRunError, match="no part returned from slurm: gone"):
        run(_1=LostPart("gone"), _2=LostPart("gone"), _3=LostPart("gone"))


@pytest.mark.parametrize(
    ("engine", "error", "said"),
    [
        ("dask", UsageError,
         "--on 'dask' is not an engine; expected ray, slurm, or ray://HOST:PORT"),
        ("slurm://there", CannotRunError,
         "Slurm takes no address, because distcheck uses the local sbatch"),
        ("slurm", CannotRunError, "--on slurm needs sbatch, which is not on PATH"),
        ("ray", CannotRunError, "needs ray, which is not installed; run pip install 'distcheck[ra"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_gets_one_sentence(
    engine: str, error: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", TYPED)
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "ray" else found(name)
    )
    with pytest.raises(error) as raised:
        run_on(engine, plan, files={}, quiet=True)
    assert said in str(raised.value)


def test_a_ray_of_this_machine_is_a_new_one_in_a_private_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All users can write to Ray's own folder, and to the address of the cluster there."""
    given: dict[str, Any] = {}
    events: list[str] = []

    class Ray(SimpleNamespace):
        exceptions = SimpleNamespace(RayError=RuntimeError)

        def init(self, **settings: Any) -> None:
            given.update(settings)

        def nodes(self) -> list[Any]:
            return [{"Alive": True, "Resources": {"CPU": 2}}]

        def remote(self, task: object) -> Any:
            options = SimpleNamespace(remote=lambda *words: "task")
            return SimpleNamespace(options=lambda **needs: options)

        def cancel(self, task: object, *, force: bool) -> None:
            events.append("cancel")

        def shutdown(self) -> None:
            events.append("shutdown")
            assert Path(given["_temp_dir"]).is_dir()

    monkeypatch.setitem(sys.modules, "ray", Ray())
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("RAY_ADDRESS", "")
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):  # they are set
        monkeypatch.setenv(name, "token")
    work = [MatrixTask(number=1, name="one", words=(), ranks=2, gpus=0)]
    for version, mode in (("2.51.1", "token"), ("2.60.0", "disabled")):
        with monkeypatch.context() as patch:
            patch.setattr(metadata, "version", {"ray": version}.__getitem__)
            patch.setenv("RAY_AUTH_MODE", mode)
            with pytest.raises(CannotRunError, match="runs code of every user who reaches it"):
                on_ray.start("", work)
    assert not given
    monkeypatch.setattr(metadata, "version", {"ray": "2.52.0"}.__getitem__)
    engine = on_ray.start("", work)
    folder = Path(given["_temp_dir"])
    assert given["address"] == "local"
    assert folder.parent == tmp_path
    assert private.is_private_folder(folder, strictly=True)
    engine.close()
    assert events == ["cancel", "shutdown"]
    assert not folder.exists()
    reached: list[tuple[str, int]] = []

    def connect(place: tuple[str, int], timeout: float) -> object:
        reached.append(place)
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(socket, "create_connection", connect)
    for address, variable in (("head:1", ""), ("", "head:1")):
        given.clear()
        monkeypatch.setenv("RAY_ADDRESS", variable)
        on_ray.start(address, work)
        assert given["address"] == (f"ray://{address}" if address else None)
        assert "_temp_dir" not in given
    assert reached == [("head", 1)] * 2
    given.clear()
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "ray", Ray())
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    with pytest.raises(CannotRunError, match=r"no Ray cluster .*refused"):
        on_ray.start("", work)
    assert not given, "Ray itself would retry for more than a minute"
