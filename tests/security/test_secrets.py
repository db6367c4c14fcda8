"""Secrets of the environment: masked where an exception or a print quotes them."""

import atexit
import json
import shlex
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import msgspec
import pytest

from distcheck import private
from distcheck.errors.masking import masked, secrets_of
from distcheck.errors.shown_text import print_displayable
from distcheck.job import command as job_command
from distcheck.job import machines
from distcheck.job.inside import parameters, rank
from distcheck.recordings.jobs.records import (
    RankRecord,
    read_record,
    with_masked_command,
    write_json,
)
from distcheck.records import Adaptation, Report
from distcheck.reports import json_report
from distcheck.reports.documents import read_report
from distcheck.reports.files import write_document, write_outputs
from distcheck.reports.terminal import console_for, render, render_text, summarize
from distcheck.store.bundle import make_bundle
from distcheck.store.origin import origin_here
from distcheck.worlds.local import child
from tests.documents import ENVIRONMENT, crash
from tests.security import zips

VALUE = "hunter2-of-the\\colleague"
TOKEN = "ghp_0123456789abcdefABCDEF"


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", VALUE)


def test_what_looks_like_a_secret() -> None:
    names = (
        "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "db_passwd", "APIKEY", "KEY",
        "GOOGLE_CREDENTIALS", "SSH_PASSPHRASE", "DISTCHECK_SECRET", "WANDB_API_KEY", "GH_PAT",
        "NPM_AUTH", "SLACK_WEBHOOK_URL", "SENTRY_DSN", "APP_JWT", "MYSQL_PWD",
        "DB_PASS", "AWS_ACCESS_KEY_ID", "SESSION_COOKIE", "AZURE_STORAGE_CONNECTION_STRING",
    )  # fmt: skip
    others = (
        "PATH", "MONKEYS", "KEYBOARD", "SESSION_TOKEN_ID", "DISTCHECK_SECRET_FILE", "HOME", "PWD",
        "OLDPWD", "SSH_AUTH_SOCK", "GIT_AUTHOR_NAME", "PATTERN", "COMPASS",
    )  # fmt: skip
    found = secrets_of({name: f"value of {name}" for name in (*names, *others)})
    assert sorted(found.values()) == sorted(names)
    assert secrets_of({"MY_TOKEN": "short"}) == {}
    address = {"DATABASE_URL": "postgres://me:of-the-colleague@host/db", "PAGE": "https://a:80/b@c"}
    assert secrets_of(address) == {"of-the-colleague": "DATABASE_URL"}
    assert masked(f"a {VALUE} {VALUE!r}") == "a <$MY_API_KEY> '<$MY_API_KEY>'"


def test_parts_of_a_secret_are_masked() -> None:
    """A line of a private key, and a token in an address; no name of a user."""
    key = "-----BEGIN KEY-----\nMIIEvQIBADANBgkqhkiG\nshort\n-----END KEY-----"
    found = secrets_of({"SSH_PRIVATE_KEY": key})
    assert sorted(found) == [key, "MIIEvQIBADANBgkqhkiG"]
    address = {"REMOTE": "https://ghp_0123456789abcdef@host/x", "DOCKER_HOST": "ssh://ubuntu@host"}
    assert secrets_of(address) == {"ghp_0123456789abcdef": "REMOTE"}


def test_the_command_of_a_run_is_masked(tmp_path: Path) -> None:
    """`made` is a record within the report."""
    made = origin_here()
    made = msgspec.structs.replace(made, command=f"distcheck verify --arg token={VALUE}")
    report = Report(environment=ENVIRONMENT, cases=(crash(text="x"),), made=made)
    write_outputs({"json": str(tmp_path / "r.json")}, report)
    document = json.loads((tmp_path / "r.json").read_text())
    assert document["made"]["command"] == "distcheck verify --arg 'token=<$MY_API_KEY>'"


@pytest.mark.parametrize("form", ["junit", "html"])
def test_the_command_of_a_case_is_masked(tmp_path: Path, form: str) -> None:
    """It follows from the case, whose arguments are pairs: only together they are a password."""
    case = crash(text="x")
    called = Adaptation(arguments=(("password", "'of-the-colleague1'"),))
    case = msgspec.structs.replace(case, case=msgspec.structs.replace(case.case, adaptation=called))
    write_outputs({form: str(tmp_path / "r")}, Report(environment=ENVIRONMENT, cases=(case,)))
    text = (tmp_path / "r").read_text().replace("<wbr>", "")
    assert "[masked]" in text
    assert "colleague1" not in text


def test_a_masked_command_stays_one(tmp_path: Path) -> None:
    """A path with such a value in it: the report is not damaged by the mask."""
    case = msgspec.structs.replace(crash(text="x"), replay=shlex.join(["distcheck", "x", VALUE]))
    place = tmp_path / "r.json"
    write_outputs({"json": str(place)}, Report(environment=ENVIRONMENT, cases=(case,)))
    assert read_report(place)["cases"][0]["replay"] == "distcheck x '<$MY_API_KEY>'"


def test_a_secret_is_found_as_it_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    value = 'ab"c\nd\\e/of the colleague'
    monkeypatch.setenv("MY_TOKEN", value)
    for text in (value, repr(value), json.dumps({"x": value}), f"https://h/?t={quote(value, '')}"):
        assert "colleague" not in masked(text)


def test_a_rank_masks_what_it_raises() -> None:
    event = child.message_of_exception(RuntimeError(f"login with {VALUE} failed"))
    assert event.message == "login with <$MY_API_KEY> failed"
    assert VALUE not in event.traceback


@pytest.mark.parametrize("form", ["json", "junit", "html"])
def test_reports_are_masked(tmp_path: Path, form: str) -> None:
    report = Report(environment={**ENVIRONMENT, "x": VALUE}, cases=(crash(text=VALUE),))
    write_outputs({form: str(tmp_path / "report")}, report)
    text = (tmp_path / "report").read_text()
    assert "hunter2" not in text.replace("<wbr>", "")
    assert "MY_API_KEY" in text.replace("<wbr>", "")


def test_names_and_verdicts_are_not_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable may have any value: the report stays one."""
    monkeypatch.setenv("ODD_KEY", "unknown")
    report = Report(environment=ENVIRONMENT, cases=(crash(text="x"),))
    write_outputs({"json": str(tmp_path / "report")}, report)
    (case,) = json.loads((tmp_path / "report").read_text())["cases"]
    assert [check["verdict"] for check in case["checks"]] == ["fail", "unknown"]


def test_bundles_are_masked(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "cases").mkdir(parents=True)
    case: dict[str, Any] = {**zips.CASE, "strategy": "ddp"}
    (run / "cases/case-w2.json").write_text(json.dumps(case))
    from distcheck.reports.json_report import render_json

    report = Report(environment=ENVIRONMENT, cases=(crash(text=VALUE),))
    (run / "report.json").write_text(render_json(report))
    make_bundle(run, tmp_path / "b.zip", traces=False)
    with zipfile.ZipFile(tmp_path / "b.zip") as archive:
        text = b"".join(archive.read(name) for name in archive.namelist())
    assert b"hunter2" not in text
    assert b"<$MY_API_KEY>" in text


def test_the_screen_is_masked(capsys: pytest.CaptureFixture[str]) -> None:
    """Also what is long enough to be cut in the middle, and a secret that has a form alone."""
    report = Report(
        environment=ENVIRONMENT, cases=(crash(text=f"{VALUE} {TOKEN} " + "x" * 40_000),)
    )
    render(report, console_for(width=1000), verbose=True)
    print(render_text(report, width=80))
    print(summarize(report))
    said = capsys.readouterr().out
    assert "MY_API_KEY" in said
    assert "hunter2" not in said
    assert TOKEN not in said
    print_displayable(f"distcheck: {VALUE}", err=True)
    assert capsys.readouterr().err == "distcheck: <$MY_API_KEY>\n"


def test_a_report_of_others_is_masked(tmp_path: Path) -> None:
    """`report` and `merge` write documents that they have read."""
    report = Report(environment=ENVIRONMENT, cases=(crash(text=f"see {TOKEN}"),))
    document = msgspec.to_builtins(json_report.document_of(report))
    write_document({"html": str(tmp_path / "r.html"), "junit": str(tmp_path / "r.xml")}, document)
    for file in tmp_path.iterdir():
        assert TOKEN not in file.read_text()


def test_a_kept_run_of_a_job_is_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    report = Report(environment=ENVIRONMENT, cases=(crash(text=f"{VALUE} {TOKEN}"),))
    assert job_command._store_report(report).saved_to
    (kept,) = tmp_path.rglob("report.json")
    assert "hunter2" not in kept.read_text()
    assert TOKEN not in kept.read_text()


def test_recorded_variables_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_SECRET", "GROUP_TOKEN", "ROLE_X", "ACCELERATE_HUB_TOKEN", "LOCAL_RANK",
                 "TORCHELASTIC_Y", "OMPI_COMM_WORLD_Z"):  # fmt: skip
        monkeypatch.setenv(name, "hunter2")
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "--hub-token", "swordfish"])
    monkeypatch.setattr(rank, "mark_rank", lambda: None)
    monkeypatch.setattr(atexit, "register", lambda *_: None)
    for number in range(2):
        rank.write_rank_record(tmp_path, number, 2, parameters.Parameters())
    first, second = (read_record(tmp_path / f"rank-000{n}/rank.json", RankRecord) for n in range(2))
    assert {*first.variables} & {"LOCAL_SECRET", "GROUP_TOKEN", "ROLE_X", "TORCHELASTIC_Y",
                                 "ACCELERATE_HUB_TOKEN", "OMPI_COMM_WORLD_Z"} == set()  # fmt: skip
    assert first.variables["LOCAL_RANK"] == "hunter2"
    assert first.arguments[-1] == "swordfish", "the reference is started with it"
    assert second.arguments[-2:] == ("--hub-token", "[masked]")
    assert with_masked_command(first).arguments == second.arguments
    for path in tmp_path.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0


def test_what_another_machine_is_sent_is_masked(tmp_path: Path) -> None:
    own = RankRecord(rank=0, world=2, arguments=("train.py", f"--name={TOKEN}"), folder="/x",
                     backend="gloo", device="cpu", torch="2")  # fmt: skip
    private.folder(tmp_path / "rank-0000")
    write_json(tmp_path / "rank-0000/rank.json", own)
    sent: list[object] = []
    line = SimpleNamespace(send=sent.append)
    machines._send(line, tmp_path, [own], SimpleNamespace(code=0))  # type: ignore[arg-type]
    data = b"".join(one.data for one in sent if isinstance(one, machines.FileChunk))
    assert b"train.py" in data
    assert TOKEN.encode() not in data
