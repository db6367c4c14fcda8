"""Secrets of the environment: masked where an exception or a print quotes them."""

import json
import shlex
import zipfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest

from distcheck.errors.masking import masked, secrets_of
from distcheck.records import Report
from distcheck.reports.documents import read_report
from distcheck.reports.files import write_outputs
from distcheck.store.bundle import make_bundle
from distcheck.store.origin import origin_here
from distcheck.worlds.local import child
from tests.documents import ENVIRONMENT, crash
from tests.security import zips

VALUE = "hunter2-of-the\\colleague"


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", VALUE)


def test_what_looks_like_a_secret() -> None:
    names = (
        "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "db_passwd", "APIKEY", "KEY",
        "GOOGLE_CREDENTIALS", "SSH_PASSPHRASE", "DISTCHECK_SECRET", "WANDB_API_KEY", "GH_PAT",
        "NPM_AUTH", "SLACK_WEBHOOK_URL", "SENTRY_DSN", "APP_JWT", "MYSQL_PWD",
        "DB_PASS", "SESSION_COOKIE", "AZURE_STORAGE_CONNECTION_STRING",
    )  # fmt: skip
    others = (
        "PATH", "MONKEYS", "KEYBOARD", "AWS_ACCESS_KEY_ID", "DISTCHECK_SECRET_FILE", "HOME", "PWD",
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
    event = child.as_event(RuntimeError(f"login with {VALUE} failed"))
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
