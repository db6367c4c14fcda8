"""The command line itself: help, names that are nearly right, completion, and the runs it keeps."""

import os
import re
import subprocess
import sys
import webbrowser
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from distcheck import cli
from distcheck.cli import root_command
from distcheck.cli.commands import COMMANDS
from distcheck.errors import ExitCode, UsageError
from distcheck.records import Report
from distcheck.records.run_facts import Origin
from distcheck.reports.json_report import render_json
from distcheck.store.run_folder import stored_runs
from tests.documents import ENVIRONMENT, passing
from tests.optional import needs_all


def refusal(*words: str) -> str:
    """What a command says of words that it does not take; they are exit code 2."""
    ran = CliRunner().invoke(root_command, words, standalone_mode=False, prog_name="distcheck")
    assert isinstance(ran.exception, UsageError | click.UsageError), ran.exception
    error = ran.exception
    return error.format_message() if isinstance(error, click.UsageError) else str(error)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("verfy",), "unknown command 'verfy' (did you mean verify?); known are verify, job"),
        (("xyz",), "unknown command 'xyz'; known are verify"),
        (("verify", "allreduce"), "'allreduce'; distcheck verify takes only options; pass "
         "--strategy allreduce"),
        (("verify", "alreduce"), "pass --strategy allreduce"),
        (("verify", "my_sync.py:sync"), "pass --strategy my_sync.py:sync"),
        (("verify", "--world", "2", "mlp"), "pass --workload mlp"),
        (("plan", "ddp"), "distcheck plan takes only options; pass --strategy ddp"),
        (("explore", "ring"), "pass --strategy ring"),
        (("backends", "gloop"), "pass --backend gloo"),
        (("selftest", "no_sync"), "pass -k no_sync"),
        (("help",), "unknown command 'help' (did you mean --help?)"),
        (("version",), "(did you mean --version?)"),
        (("my_sync.py:sync",), "to check it, run distcheck verify --strategy my_sync.py:sync"),
        (("train.py",), "whole script, run distcheck job --world 2 -- python train.py"),
        (("--world", "4", "verify"), "options follow the command: distcheck verify --world ..."),
        (("explain", "NO-SYNC"), "(did you mean missing-sync?)"),
        (("explain", ""), "unknown cause ''"),
        (("explore", "--strategy", "ddp", "--world", "1"), "--world 1 is out of range; it takes 2"),
        (("backends", "--op", "allreduce"), "unknown --op 'allreduce' (did you mean all_reduce?)"),
        (("replay", "report.json"), "report.json is a report; pass its folder, ."),
        (("doctor", "x"), "Got unexpected extra argument (x)"),
        (("verify", "--strategy", "alreduce"), "unknown strategy 'alreduce' (did you mean "
         "allreduce?); known are allreduce,"),
        (("explore", "--strategy", "alreduce"), "(did you mean allreduce?)"),
        (("verify", "--strategy", "ddp", "--workload", "cn"), "unknown workload 'cn' (did you mean "
         "cnn?); known are"),
        (("verify", "--strategy", "ddp", "--data", "cifr10"), "(did you mean cifar10?)"),
        (("verify", "--strategy", "ddp", "--dtype", "flaot32"), "(did you mean float32?)"),
        (("verify", "--strategy", "ddp", "--device", "cdua"), "unknown device 'cdua' (did you mean "
         "cuda?); known are cpu and cuda"),
        (("verify", "--strategy", "ddp", "--thorough", "--without", "sprse"), "(did you mean "
         "sparse?)"),
        (("verify", "--strategy", "ddp", "--as", "modle"), "(did you mean model?)"),
        (("verify", "--strategy", "ddp", "--backend", "gloop"), "unknown backend 'gloop' (did you "
         "mean gloo?); known are gloo, mpi, nccl, simulated; gloo, "),
        (("verify", "--strategy", "ddp", "--backend", "simulated:rnig"), "unknown order 'rnig' of "
         "backend simulated (did you mean ring?); known are gloo, ring, tree, "),
        (("verify", "--strategy", "ddp", "--backend", "gloo:ring"), "unknown backend 'gloo:ring'"),
        (("verify", "--stratgy", "ddp"), "--strategy"),
        (("verify", "--strategy"), "Option '--strategy' requires an argument"),
        (("verify", "--world"), "Option '--world' requires an argument"),
        (("verify", "--strategy", "ddp", "--world", "-2"), "--world -2 is out of range"),
        (("verify", "--world", "2,4"), "'2,4' is not an integer; repeat the option: --world 2 "
         "--world 4"),
        (("verify", "--seed", "2,4"), "'2,4' is not an integer"),
        (("verify", "--strategy", "ddp", "--world", "2", "3"), "repeat the option: --world 2 "
         "--world 3"),
        (("verify", "-w", "4"), "No such option '-w'; distcheck verify --help lists them"),
        (("compare",), "Missing argument 'DIR'; write distcheck compare [OPTIONS] DIR [DIR]"),
        (("compare", "a", "b", "c"), "extra argument (c); write distcheck compare [OPTIONS] DIR "),
        (("verify", "--strategy", ":f"), "strategy ':f' names no file; pass path/to/file.py:f"),
        (("verify", "--strategy", "text.txt:f"), "text.txt is not Python; pass a file whose name "
            "ends in .py"),
        (("verify", "--strategy", "ddp", "--explore-s", "5"), "--explore-s requires --thorough"),
        (("verify", "--strategy", "ddp", "--data-dir", "x"), "pass --data cifar10 or --data mnist"),
        (("train", "--data-dir", "x"), "pass --data cifar10 or --data mnist"),
        (("train", "--epochs", "0"), "--epochs 0 is out of range; it takes 1 or more"),
        (("train", "--log-every", "-1"), "--log-every -1 is out of range; it takes 0 or more"),
        (("job", "--guard", "--steps", "4", "--", "x"), "--steps requires a recording, but "
         "--guard makes none"),
        (("job", "--reference", "", "--", "x"), "--reference requires a command"),
        (("job", "--reference", "x", "--no-reference", "--", "x"), "or pass --no-reference"),
    ],
)  # fmt: skip
@needs_all
def test_what_was_probably_meant(
    words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("no Python")
    Path("report.json").write_text('{"schema": "distcheck.report/1"}')
    monkeypatch.setattr("distcheck.machine.devices.gpu_count", lambda: 0)
    monkeypatch.setattr("distcheck.addons.mpi.missing", lambda: "no MPI")
    assert said in refusal(*words)


def help_of(*words: str) -> str:
    ran = CliRunner().invoke(root_command, [*words, "--help"], terminal_width=80)
    assert ran.exit_code == 0
    return ran.output


@pytest.mark.parametrize("name", root_command.list_commands(click.Context(root_command)))
def test_help_fits_and_has_one_form_of_default(name: str) -> None:
    text = help_of(name)
    assert max(map(len, text.splitlines())) <= 80
    joined = " ".join(text.split())
    bracketed = re.findall(r"\[([^\]]*)\]", joined.partition(" -h, --help ")[0])
    others = ("default: ", "OPTIONS", "DIR", "RUN", "CAUSE|FILE", "data", "explore")
    assert [said for said in bracketed if not said.startswith(others)] == []
    assert "is no " not in joined


def test_a_long_list_of_options_is_in_groups() -> None:
    text = help_of("verify")
    headings = re.findall(r"^(\w.*):$", text, re.M)
    assert headings == [
        "Checks", "How the strategy is called", "Data and ranks",
        "Several machines, without a launcher", "Output",
    ]  # fmt: skip
    command = root_command.get_command(click.Context(root_command), "verify")
    assert command is not None
    for param in command.params:
        if not getattr(param, "hidden", False):
            assert all(word in text for word in param.opts), param.name
    assert "Options:" in help_of("list")


@needs_all
def test_the_list_of_commands_fits_and_says_how_to_complete() -> None:
    text = help_of()
    assert max(map(len, text.splitlines())) <= 80
    assert "..." not in text.partition("Commands:")[2]
    for name, summary in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(summary)}$", text, re.M)
    assert '_DISTCHECK_COMPLETE=bash_source distcheck)"' in text


@pytest.mark.parametrize(
    ("line", "found", "missing"),
    [
        ("verify --strategy all", ["allreduce"], "ddp"),
        ("verify --workload c", ["cnn", "composite"], "mlp"),
        ("verify --backend ", ["gloo", "mpi", "nccl", "simulated", "simulated:tree"], "cpu"),
        ("verify --dtype fl", ["float32", "float64", "float16"], "bfloat16"),
        ("verify --data ci", ["cifar10"], "mnist"),
        ("verify --as mod", ["model"], "wrapper"),
        ("verify --loss mean/", ["mean/world"], "sum/global"),
        ("verify --without ada", ["adamw"], "resume"),
        ("explore --strategy zer", ["zero1"], "ddp"),
        ("ver", ["verify"], "plan"),
    ],
)
@needs_all
def test_completion_of_names(
    line: str, found: list[str], missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = line.split(" ")
    assert completed(words[:-1], words[-1]) >= set(found)
    assert missing not in completed(words[:-1], words[-1])


def completed(words: list[str], incomplete: str) -> set[str]:
    from click.shell_completion import BashComplete

    complete = BashComplete(root_command, {}, "distcheck", "_DISTCHECK_COMPLETE")
    return {item.value for item in complete.get_completions(words, incomplete)}


def test_completion_imports_no_torch(tmp_path: Path) -> None:
    """At every press of a key."""
    code = "import sys; from distcheck.cli import main\ntry: main()\nfinally: print(*sys.modules)"
    environment = {
        **os.environ, "COMP_WORDS": "distcheck verify --strategy zer", "COMP_CWORD": "3",
        "_DISTCHECK_COMPLETE": "bash_complete",
    }  # fmt: skip
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    first, modules = ran.stdout.splitlines()
    assert first == "plain,zero1"
    assert "torch" not in modules.split()


def keep_run(name: str, *, report: str | None) -> Path:
    folder = Path(".distcheck/runs") / name
    (folder / "cases").mkdir(parents=True)
    if report is not None:
        (folder / "report.json").write_text(report)
    return folder


@pytest.mark.parametrize(
    "name", [";touch ran", "$(touch ran)", "`touch ran`", "a b", "a\nplain,;touch ran", "'", "x&"]
)
@pytest.mark.parametrize("command", ["replay", "recheck", "bundle", "report", "open"])
def test_a_shell_is_given_no_name_that_it_would_run(
    name: str, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A completed word stands in the command line as it is, without quotes."""
    monkeypatch.chdir(tmp_path)
    keep_run("20260131-120000-1", report=None)
    keep_run(name, report=None)
    assert completed([command], ".dist") == {".distcheck/runs/20260131-120000-1"}
    assert completed([command], ".distcheck/runs/" + name[0]) <= {".distcheck/runs/" + name[0]}


def kept_report(date: str, command: str) -> str:
    made = Origin(date=date, command=command)
    return render_json(Report(environment=ENVIRONMENT, cases=(passing(),), made=made))


def test_runs_lists_what_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(root_command, ["runs"]).output == ".distcheck here has no runs\n"
    keep_run("20260131-110000-1", report=kept_report("2026-01-31T11:00:00", "distcheck verify -q"))
    keep_run("20260131-120000-2", report=None)
    keep_run("20260131-130000-3", report="{")
    keep_run("20260131-140000-4", report='{"schema": "distcheck.report/1", "made": 7}')
    ran = CliRunner().invoke(root_command, ["runs"])
    assert ran.exit_code == 0
    first, command, *others = ran.output.splitlines()
    assert first == "2026-01-31 11:00  pass          .distcheck/runs/20260131-110000-1"
    assert command == "    distcheck verify -q"
    assert [line[18:32].strip() for line in others] == [
        "not finished", "not readable", "not readable",
    ]  # fmt: skip


@pytest.mark.parametrize("command", ["open", "replay", "report"])
def test_an_absent_run(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    for name, why in (("nowhere", "does not exist"), ("empty", "holds no")):
        said = refusal(command, name)
        assert said.startswith(f"{name} {why}")
        assert "; run distcheck runs to list those" in said
    assert not [*Path().rglob("report.html")]


@pytest.mark.parametrize("browser", [True, False])
def test_open_the_last_page(browser: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    opened: list[Any] = []

    def show(address: str) -> bool:
        opened.append(address)
        return browser

    monkeypatch.setattr(webbrowser, "open", show)
    assert "has no run with a report" in refusal("open")
    first = keep_run("20260131-110000-1", report=kept_report("2026-01-31T11:00:00", "one"))
    last = keep_run("20260131-120000-2", report=kept_report("2026-01-31T12:00:00", "two"))
    keep_run("20260131-130000-3", report=None)
    ran = CliRunner().invoke(root_command, ["open"])
    page = last / "report.html"
    assert opened == [page.absolute().as_uri()]
    said = "" if browser else "no browser could be started; open "
    assert ran.output == f"{said}{opened[0]}\n"
    assert "<code>two</code>" in page.read_text()
    CliRunner().invoke(root_command, ["open", str(first)])
    assert opened[-1] == (first / "report.html").absolute().as_uri()
    assert stored_runs()[-1].name == "20260131-130000-3"


def test_a_name_that_is_not_utf8_is_refused() -> None:
    ran = CliRunner().invoke(root_command, ["verify", "--strategy", "b\udcff.py:f"])
    assert ran.exit_code == ExitCode.USAGE
    assert "'b\\udcff.py:f' is not UTF-8; rename it" in ran.output


def test_too_little_memory_is_no_defect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli._print_unexpected_error(MemoryError()) == ExitCode.CANNOT_RUN
    assert "memory is insufficient; free some" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
