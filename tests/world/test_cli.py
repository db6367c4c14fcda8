"""The command line, as a person meets it: verdicts, exit codes, bad input."""

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file, save_file

from distcheck.records import Case
from tests.sealing import rewrite_about
from tests.world.command import COMMAND, MOODY, PROGRESS, QUICK, ROOT, SURE, Run, complaints
from tests.world.command import distcheck as console
from tests.world.warm import distcheck

__all__ = ["console", "distcheck"]


def sentences(ran: subprocess.CompletedProcess[str]) -> list[str]:
    return complaints(ran.stderr)


def test_exit_0_and_a_screen_that_says_what_was_compared(distcheck: Run, tmp_path: Path) -> None:
    ran = distcheck("verify", "--strategy", "allreduce", "--world", "4")
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[0] == "PASS    allreduce   4 ranks, 5 training runs, 51 checks"
    assert len(lines) <= 13
    assert [line for line in lines if line != line.rstrip()] == []
    assert "not covered: uneven shards; " in ran.stdout
    shown = re.search(r"```\n(PASS .+?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert shown is not None
    assert _without_what_varies(ran.stdout) == _without_what_varies(shown[1])
    saved = re.search(r"^saved +(\S+)", ran.stdout, re.M)
    assert saved is not None
    assert (tmp_path / saved[1] / "report.json").is_file()
    assert sorted(p.name for p in tmp_path.iterdir()) == [".distcheck", "bad.py"] or sorted(
        p.name for p in tmp_path.iterdir()
    ) == [".distcheck", "__pycache__", "bad.py"]
    written = ran.stderr.splitlines()
    assert all(line.startswith(PROGRESS) for line in written)
    last = [line.rpartition(": ") for line in written[-5:]]
    assert {verdict for _, _, verdict in last} == {"pass"}, "a line for each case, with its verdict"
    assert [line.split(" cases judged")[0] for line, _, _ in last] == [
        f"{PROGRESS}[{n} of 5" for n in (1, 2, 3, 4, 5)
    ]


@pytest.mark.parametrize(
    ("page", "world"),
    [("README.md", "2"), pytest.param("docs/tutorial.md", "3", marks=pytest.mark.sweep)],
)
def test_a_failure_is_as_documented(page: str, world: str, distcheck: Run, tmp_path: Path) -> None:
    """But for the trainings beside the first, which are not run here."""
    text = (ROOT / page).read_text()
    code = re.search(r"```python\n(# my_sync.py\n.+?)```", text, re.DOTALL)
    shown = re.search(r"^(FAIL    my_sync.py:sync .+?)\n  \.\.\.", text, re.DOTALL | re.MULTILINE)
    assert code is not None
    assert shown is not None
    (tmp_path / "my_sync.py").write_text(code[1])
    words = ("--strategy", "my_sync.py:sync", "--world", world, "--workload", "exact")
    ran = distcheck("verify", *words)
    assert ran.returncode == 1
    entries = [" ".join(one.split()) for one in re.split(r"\n      (?=\w)", shown[1])]
    there = " ".join(ran.stdout.split())
    first = [one.partition("; with --batch")[0] for one in entries]
    assert [
        one for one in first if not one.startswith(("also in", "ok ")) and one not in there
    ] == []
    assert {one.split()[0] for one in first} >= {"FAIL", "cause", "first", "where", "try"}


def test_exit_1_names_place_numbers_and_what_to_run(distcheck: Run, tmp_path: Path) -> None:
    ran = distcheck("verify", "--strategy", "bad.py:no_sync", *SURE)
    assert ran.returncode == 1
    assert "FAIL    bad.py:no_sync   2 ranks: missing-sync" in ran.stdout
    place = (
        r"workload mlp:small float32: gradients, step 0, parameter\s+1.weight\[0,0\], rank 0:\s+got"
    )
    assert re.search(rf"first\s+{place}", ran.stdout)
    replay = re.search(r"^replay distcheck replay (\S+)", ran.stdout, re.M)
    assert replay is not None
    again = distcheck("replay", replay[1], "-v")
    assert again.returncode == 1
    assert "ULP" in again.stdout
    rechecked = distcheck("recheck", str(tmp_path / replay[1]))
    assert rechecked.returncode == 1, "the trace of a small failed case is kept"
    first = re.compile(r"^ +(?:cause|first|try) .*$", re.M)
    assert first.findall(rechecked.stdout) == first.findall(ran.stdout) != []


def _without_what_varies(screen: str) -> str:
    """A screen without the run's name and how large errors were."""
    text = re.sub(r"\.distcheck/runs/\S+", ".distcheck/runs/...", screen)
    text = re.sub(r"\d+%", "#%", text)
    return " ".join(re.sub(r"\d\.\d+(e[+-]\d+)?", "#", text).split())


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["verify"], 2, "NAME is one of allreduce, column_parallel, "),
        (["verify", "--strategy", "alreduce"], 2, "unknown strategy 'alreduce' (did you mean"),
        (["verify", "--strategy", "ddp", "--wrld", "4"], 2, "No such option '--wrld'"),
        (["verify", "--strategy", "ddp", "--world", "four"], 2, "'four' is not an integer"),
        (["verify", "--strategy", "ddp", "--world", "0"], 2, "--world 0 is out of range"),
        (["verify", "--strategy", "ddp", "--world", "1000"], 2, "smaller than --world 1000"),
        (["verify", "--strategy", "ddp", "--workload", "vgg"], 2, "unknown workload 'vgg'"),
        (["verify", "--strategy", "ddp", "--data", "svhn"], 2, "unknown data 'svhn'"),
        (["verify", "--strategy", "none.py:f"], 2, "strategy file none.py does not exist"),
        (["verify", "--strategy", "bad.py"], 2, "for example bad.py:good"),
        (["verify", "--strategy", "bad.py:nothing"], 2, "it defines good, no_sync, crash, doubled"),
        (["verify", "--strategy", "ddp", "--device", "cuda"], 3, "'cuda' is not available"),
        (["verify", "--strategy", "ddp", "--backend", "nccl"], 3, "needs an NVIDIA GPU"),
        (["verify", "--strategy", "ddp", "--json", "no/such/dir/x"], 3, "cannot be written"),
        (["verify", "--strategy", "ddp", "--save", "bad.py"], 2, "bad.py is a file"),
        (["verify", "--strategy", "ddp", "--save", "."], 2, "is not empty"),
        (["verify", "--strategy", "ddp", "--save", "/proc/nope"], 3,
         "/proc/nope cannot be written"),
        (["recheck", "nowhere"], 2, "nowhere holds no traces"),
        (["replay", "bad.py"], 2, "bad.py is not a case file"),
        (["train", "--world", "2"], 2, "--world 2 needs a --strategy"),
        (["train", "--workload", "exact"], 2, "exact has no accuracy"),
        (["verfy"], 2, "unknown command 'verfy' (did you mean verify?)"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)  # fmt: skip
def test_bad_input_gets_one_sentence(
    distcheck: Run, tmp_path: Path, words: list[str], code: int, message: str
) -> None:
    ran = distcheck(*words)
    assert ran.returncode == code
    assert len(sentences(ran)) == 1
    assert sentences(ran)[0].startswith("distcheck: ")
    assert message in ran.stderr
    assert ran.stdout == ""
    left = {p.name for p in tmp_path.iterdir()} - {"bad.py", "__pycache__"}
    assert not left


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def f(model:\n", "has a syntax error in line 1"),
        ("raise ValueError('too early')\n", "raised ValueError: too early"),
        ("import no_such_thing\n", "raised ModuleNotFoundError"),
        ("import os; os._exit(3)\n", "exited with code 3"),
    ],
)
def test_files_that_do_not_load(distcheck: Run, tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "broken.py").write_text(source)
    ran = distcheck("verify", "--strategy", "broken.py:f", *QUICK)
    assert ran.returncode in (2, 3)
    assert len(sentences(ran)) == 1
    assert message in ran.stderr
    assert not (tmp_path / ".distcheck").exists()


@pytest.mark.sweep
def test_modules_of_the_folder_shadow_nothing(console: Run, tmp_path: Path) -> None:
    for name in ("random", "typing", "torch", "strategies"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not this one')\n")
    ran = console("verify", "--strategy", "allreduce", *QUICK, "-q")
    assert ran.returncode == 0, ran.stderr


def test_a_module_of_the_folder_is_found_by_its_name(distcheck: Run, tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "distcheck", "verify", "--strategy", "bad:good", *QUICK, "-q"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr


def test_workload_and_data_that_do_not_fit(distcheck: Run) -> None:
    ran = distcheck("verify", "--strategy", "ddp", "--batch", "60000", "--workload", "mlp")
    assert ran.returncode == 2
    assert "batch 60000 is larger than the data set: synthetic has 50000 samples" in ran.stderr


def test_exit_4_names_the_rank_and_the_reason(distcheck: Run) -> None:
    ran = distcheck("verify", "--strategy", "bad.py:crash", *QUICK)
    assert ran.returncode == 4
    assert "RuntimeError: the reason" in ran.stdout
    assert re.search(r"rank 1\s+raised an exception in step 0 \(sync\)", ran.stdout)
    assert "2 ranks: crash" in ran.stdout


def test_exit_4_for_a_hang_within_the_deadline(distcheck: Run) -> None:
    ran = distcheck("verify", "--strategy", "bad.py:hang", *QUICK, "--deadline", "3")
    assert ran.returncode == 4
    assert re.search(r"rank 1\s+hung in step 1 \(sync\)", ran.stdout)
    assert "time.sleep(1000)" in ran.stdout
    assert re.search(
        r"rank 0\s+hung in step 1 \(sync\)\s+last collective: all_reduce of", ran.stdout
    )


def test_save_and_recheck(distcheck: Run, tmp_path: Path) -> None:
    ran = distcheck("verify", "--strategy", "ddp", *QUICK, "--save", "kept")
    assert ran.returncode == 0
    again = distcheck("recheck", "kept", "--json", "again.json")
    assert again.returncode == 0, again.stderr
    assert json.loads((tmp_path / "again.json").read_text())["verdict"] == "pass"
    report = tmp_path / "kept" / "report.json"
    sound = report.read_text()
    report.write_text(sound.replace("--strategy ddp", "--strategy ddp --strategy was_taken_out"))
    forged = distcheck("recheck", "kept")
    assert forged.returncode == 2
    assert "asks for strategy was_taken_out" in forged.stderr
    report.write_text(sound)
    (case,) = (tmp_path / "kept" / "traces").iterdir()
    file = case / "run-1" / "slot-001.safetensors"
    tensors = load_file(file)
    name = next(key for key in tensors if key.endswith("/gradient/1.weight"))
    tensors[name][0, 0] += 1
    save_file(tensors, file)
    damaged = distcheck("recheck", "kept")
    assert damaged.returncode == 2
    assert f"{name} differs from the recording of its rank" in damaged.stderr
    file.write_bytes(b"not a tensor file")
    assert "is damaged" in distcheck("recheck", "kept").stderr
    for name in ("run-1/index.bin", "about.json"):
        whole = (case / name).read_bytes()
        (case / name).write_bytes(bytes([whole[0], whole[1] ^ 1]) + whole[2:])
        damaged = distcheck("recheck", "kept")
        assert damaged.returncode == 2
        said = f"{Path(name).name} does not have the checksum in checksums.json"
        assert said in damaged.stderr
        (case / name).write_bytes(whole)
    (case / "checksums.json").unlink()
    unknown = distcheck("recheck", "kept")
    assert unknown.returncode == 2
    assert "an earlier version of distcheck wrote it" in unknown.stderr


def test_recheck_elsewhere_does_not_compare_bits(distcheck: Run, tmp_path: Path) -> None:
    ran = distcheck("verify", "--strategy", "bad.py:doubled_on_the_way", *QUICK, "--save", "kept")
    assert ran.returncode == 1, "only local gradients differ, to the bit"
    (about,) = tmp_path.glob("kept/traces/*/about.json")
    name = '"cpu_capability":"'
    rewrite_about(about.parent, lambda text: text.replace(name, name + "other "))
    again = distcheck("recheck", "kept")
    assert again.returncode == 5
    assert re.search(
        r"recorded elsewhere \(cpu_capability other \w+ there, \w+ here\)", again.stdout
    )


def test_exit_5_for_a_check_that_could_not_be_made(distcheck: Run, tmp_path: Path) -> None:
    """The workload works in the ranks and breaks in the process that judges."""
    (tmp_path / "moody.py").write_text(MOODY)
    ran = distcheck("verify", "--strategy", "ddp", *QUICK[2:], "--workload", "moody.py:Moody")
    assert ran.returncode == 5, ran.stdout + ran.stderr
    assert "UNKNOWN ddp" in ran.stdout
    said = " ".join(ran.stdout.split())
    assert "the check itself raised an error: RuntimeError: not in the mood" in said


def test_json_follows_its_schema_to_the_key(distcheck: Run, tmp_path: Path) -> None:
    ran = distcheck("verify", "--strategy", "bad.py:no_sync", *QUICK, "--json", "-")
    assert ran.returncode == 1
    document = json.loads(ran.stdout)
    assert list(document) == [
        "schema", "verdict", "exit_code", "totals", "made", "environment", "since_green", "cases",
        "plan", "left_out", "not_shown", "explored",
    ]  # fmt: skip
    assert document["schema"] == "distcheck.report/1"
    assert (document["verdict"], document["exit_code"]) == ("fail", 1)
    for key in ("torch", "python", "backend", "device", "threads", "cpu"):
        assert document["environment"][key]
    (case,) = document["cases"]
    assert set(case) == {
        "case", "strategy_file", "strategy_line", "verdict", "outcomes", "checks", "diagnosis",
        "where", "timings_s", "replay", "notes", "remarks", "accepted", "contents", "modules",
        "ledger", "unfinished", "rounded_to",
    }  # fmt: skip
    assert set(case["case"]) == set(Case.__struct_fields__)
    assert case["strategy_file"] == str(tmp_path / "bad.py")
    lines = (tmp_path / "bad.py").read_text().splitlines()
    assert lines[case["strategy_line"] - 1] == "def no_sync(model):"
    assert [planned["id"] for planned in document["plan"]["cases"]] == [case["case"]["id"]]
    assert (document["plan"]["shard"], document["plan"]["shards"]) == (0, 1)
    assert [set(o) for o in case["outcomes"]] == [{"rank", "outcome"}] * 2
    for check in case["checks"]:
        optional = {"compared", "worst", "first", "reason", "map", "sensitivity"}
        assert set(check) - optional == {"check", "layer", "verdict"}
        assert set(check["compared"]) == {"tensors", "elements", "ranks", "steps"}
        if "worst" in check:
            assert set(check["worst"]) == {
                "parameter", "rank", "step", "index", "actual", "expected", "error", "bound", "ulp",
                "unit", "actual_bits", "expected_bits",
            }  # fmt: skip
    bad = next(c for c in case["checks"] if (c["check"], c["layer"]) == ("gradients", "rounding"))
    assert bad["worst"]["error"] > bad["worst"]["bound"]
    assert "first divergence: step 0" in bad["reason"]
    assert [set(d) for d in case["diagnosis"]] == [{"cause", "evidence", "suggestion"}]
    assert case["replay"].startswith("distcheck replay ")
    assert msgspec.convert(case["case"], Case).command_line == (
        "distcheck verify --strategy bad.py:no_sync --world 2 --workload mlp:small --dtype float32 "
        "--batch 256 --steps 3 --seed 0 --backend gloo --data synthetic --no-separate"
    )


def test_quiet_prints_verdict_lines_alone(distcheck: Run) -> None:
    both = ("bad.py:good", "--strategy", "bad.py:no_sync")
    ran = distcheck("verify", "--strategy", *both, *SURE, "-q")
    assert ran.returncode == 1
    assert [line.split()[0] for line in ran.stdout.splitlines()] == ["PASS", "FAIL"]
    assert ran.stdout.endswith(": missing-sync\n")
    assert ran.stderr == ""


def test_no_control_codes_where_there_is_no_terminal(distcheck: Run) -> None:
    ran = distcheck("verify", "--strategy", "ddp", *QUICK)
    assert "\x1b" not in ran.stdout + ran.stderr


@pytest.mark.parametrize("no_color", [False, pytest.param(True, marks=pytest.mark.sweep)])
def test_on_a_terminal_there_is_progress_and_color(tmp_path: Path, no_color: bool) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    environment.pop("NO_COLOR", None)
    if no_color:
        environment["NO_COLOR"] = "1"
    ran = subprocess.Popen(
        [*COMMAND, "verify", "--strategy", "ddp", *QUICK],
        cwd=tmp_path, env=environment, stdout=theirs, stderr=theirs, stdin=theirs,
    )  # fmt: skip
    os.close(theirs)
    seen = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:
            break
        if not part:
            break
        seen += part
    os.close(ours)
    assert ran.wait() == 0
    text = seen.decode()
    assert re.search(r"steps? \d", text)
    assert "PASS" in text
    assert ("\x1b[1;32m" in text) is not no_color


def test_list_names_everything_in_one_line_each(console: Run) -> None:
    ran = console("list")
    assert ran.returncode == 0
    for name in ("allreduce", "gather_scatter", "vgg11", "cifar10", "local gradients", "rerun"):
        assert re.search(rf"^  {name}\s+\S", ran.stdout, re.M)


def test_doctor_is_paste_ready(distcheck: Run) -> None:
    ran = distcheck("doctor")
    assert ran.returncode == 0
    for what in ("torch", "cores", "memory", "threads", "gloo world 3", "strategies", "data"):
        assert re.search(rf"^{what}\s+\S", ran.stdout, re.M)
    has_nccl = re.search(r"^built into torch .*\bnccl\b", ran.stdout, re.M)
    assert bool(re.search(r"^NCCL +\d+\.\d+\S*; ", ran.stdout, re.M)) == bool(has_nccl)
    assert ran.stdout.count("bit-identical to the prediction") == 9


def test_train_alone_and_together(distcheck: Run, tmp_path: Path) -> None:
    """The same batches and seeds: one process and three ranks lose alike.

    Ranks with a part of the parameters each (fsdp) must evaluate together.
    """
    losses = []
    three = ["--world", "3", "--strategy"]
    for words in ([], [*three, "gather_scatter"], [*three, "fsdp"]):
        ran = distcheck(
            "train", "--workload", "mlp:small", "--steps", "15", "--epochs", "2",
            "--log-every", "10", "--json", "table.json", "--html", "page.html", *words,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        assert "step 10/15: loss" in ran.stdout
        assert re.search(r"epoch 2/2: loss \d\.\d+, accuracy \d+\.\d+% on 10,000", ran.stdout)
        assert "s per step (mean of 14 steps, without the first" in " ".join(ran.stdout.split())
        rows = json.loads((tmp_path / "table.json").read_text())["epochs"]
        losses.append([row["loss"] for row in rows])
        assert [sum(row["step_losses"]) / 15 for row in rows] == pytest.approx(losses[-1])
        assert "Loss by step" in (tmp_path / "page.html").read_text()
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0] == pytest.approx(losses[2], rel=1e-4)
    assert losses[0][1] < losses[0][0]


def test_a_layout_that_divides_nothing_is_refused_where_it_would_train(distcheck: Run) -> None:
    ran = distcheck(
        "train", "--strategy", "row_parallel", "--world", "3", "--workload", "mlp:small"
    )
    assert ran.returncode == 2
    assert sentences(ran) == [
        "distcheck: 'row_parallel' promises the mesh tensor 3, but every rank holds every "
        "parameter whole: nothing is sharded"
    ]


def test_train_names_the_rank_that_failed(distcheck: Run) -> None:
    ran = distcheck("train", "--strategy", "bad.py:crash", "--world", "2", "--workload", "mlp")
    assert ran.returncode == 4
    first, second, *_, last = ran.stderr.splitlines()
    assert first == "FAIL    bad.py:crash   2 ranks"
    assert second.startswith("      rank 1  raised an exception in step 0 (sync)")
    assert "the reason" in ran.stderr
    assert last.startswith("next   distcheck verify --strategy bad.py:crash --world 2 ")
