"""Jobs that go wrong: each ends in one clear sentence and an exit code from the table, and the
user's own output, files and standard input are as without distcheck.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from distcheck.errors import DistcheckError
from distcheck.job import running, settings
from distcheck.job.settings import JobSettings
from distcheck.records import Outcome
from distcheck.records.exit_status import RankEnd
from tests.job import worlds
from tests.waiting import wait_until
from tests.world import warm

BASE = """
import os, sys, torch, torch.distributed as dist
import torch.nn.functional as F

def train(steps, before=lambda model: 0, after=lambda step, model: None):
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(before(model), steps):
        drawn = torch.Generator().manual_seed(step * 10 + dist.get_rank())
        inputs = torch.randn(4, 6, generator=drawn)
        labels = torch.randint(0, 3, (4,), generator=drawn)
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        after(step, model)
"""

RAISES = BASE + '\nraise KeyError("learning_rate")\n'

NEEDS_A_GPU = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
"""

# Its ranks train apart, and as one process it ends at once.
WRITES_AND_ENDS_ALONE = (
    BASE.replace(
        "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(6, 3))", "torch.nn.Linear(6, 3)"
    )
    + """
print("read", len(sys.stdin.read().split()), flush=True)

def after(step, model):
    with open(f"log-{dist.get_rank()}.txt", "a") as log:
        log.write(f"{step}\\n")

dist.init_process_group("gloo")
assert dist.get_world_size() > 1, "this script is for several ranks"
train(6, after=after)
print("trained", flush=True)
"""
)

STARTS_ITS_RANKS = (
    BASE
    + """
import torch.multiprocessing as mp

def main(rank, world, port):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    train(3)

if __name__ == "__main__":
    import socket
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(main, args=(2, port), nprocs=2)
"""
)

RESUMES = (
    BASE
    + """
def before(model):
    if not os.path.exists("snapshot.pt"):
        return 0
    found = torch.load("snapshot.pt")
    model.module.load_state_dict(found["model"])
    return found["step"]

def after(step, model):
    if dist.get_rank() == 0:
        torch.save({"model": model.module.state_dict(), "step": step + 1}, "snapshot.pt")
        with open("log.txt", "a") as log:
            log.write(f"{step}\\n")
    dist.barrier()

train(9, before, after)
"""
)

FOR_GPUS = """
import os, torch, torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
local_rank = int(os.environ["LOCAL_RANK"])
dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
torch.cuda.set_device(local_rank)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)).cuda()
model = DDP(model, device_ids=[local_rank], output_device=local_rank)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
drawn = torch.Generator().manual_seed(local_rank)
seen = torch.zeros(1, device="cuda")
for step in range(4):
    inputs = torch.randn(4, 6, generator=drawn).pin_memory().to(local_rank, non_blocking=True)
    labels = torch.randint(0, 3, (4,), generator=drawn).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    seen += len(inputs)
    torch.cuda.synchronize()
"""


def run(
    folder: Path, script: str, *options: str, torchrun: bool = True, stdin: str = ""
) -> tuple[subprocess.CompletedProcess[str], Any]:
    """How `distcheck job` ended, and the case of its report, if there is one."""
    file, report = folder / "train.py", folder / "report.json"
    file.write_text(script)
    words = [sys.executable, "-m", "distcheck", "job", "--steps", "4", "--json", str(report)]
    words += [*options, *(["--nproc", "2"] if torchrun else []), "--", sys.executable, str(file)]
    ran = subprocess.run(
        words, cwd=folder, capture_output=True, text=True, timeout=300, input=stdin
    )
    cases = json.loads(report.read_text()).get("cases") if report.exists() else None
    return ran, cases[0] if cases else None


def said(ran: subprocess.CompletedProcess[str]) -> str:
    """The one sentence of distcheck's own on standard error."""
    lines = [line for line in ran.stderr.splitlines() if line.startswith("distcheck: ")]
    assert len(lines) == 1, ran.stderr
    return lines[0]


@pytest.mark.sweep
def test_a_crash_before_the_first_step_is_the_ranks_own(tmp_path: Path) -> None:
    ran, _ = run(tmp_path, RAISES)
    assert ran.returncode == 4
    assert said(ran).endswith("before its first optimizer step: KeyError: 'learning_rate'")


@pytest.mark.sweep
def test_a_script_for_gpus_cannot_run_here(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    ran, _ = run(tmp_path, NEEDS_A_GPU)
    assert ran.returncode == 3
    assert "the job needs a GPU, but this machine has none" in said(ran)
    assert "pass --on-cpu to run it on CPUs" in said(ran)


@pytest.mark.sweep
def test_a_script_for_gpus_is_judged_on_cpus(tmp_path: Path) -> None:
    ran, case = run(tmp_path, FOR_GPUS, "--on-cpu")
    assert (ran.returncode, case["verdict"]) == (0, "pass"), ran.stdout + ran.stderr
    assert any("instead of GPUs" in note for note in case["notes"])
    checks = {(c["check"], c["layer"]) for c in case["checks"]}
    assert {
        ("gradients", "full batch float32"), ("loss", "full batch float32"), ("loss scaler", "-"),
    } <= checks  # fmt: skip


@pytest.mark.sweep
def test_what_the_script_does_is_as_without_distcheck(tmp_path: Path) -> None:
    """Standard input, output and files are the job's. What is wrong is named, although the replay,
    which crashes, can show nothing.
    """
    ran, case = run(tmp_path, WRITES_AND_ENDS_ALONE, "--keep-going", stdin="a b c")
    assert (ran.returncode, case["verdict"]) == (1, "fail"), ran.stdout + ran.stderr
    assert [found["cause"] for found in case["diagnosis"]] == ["missing-sync"]
    assert "missing-sync" in ran.stdout
    assert ran.stdout.count("trained") == 2
    assert re.findall(r"^read (\d)$", ran.stdout, re.MULTILINE).count("3") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".distcheck", "log-0.txt", "log-1.txt", "report.json", "train.py",
    ]  # fmt: skip
    assert (tmp_path / "log-0.txt").read_text().split() == list("012345")
    reference = next(c for c in case["checks"] if c["check"] == "reference")
    assert reference["verdict"] == "unknown"
    assert reference["reason"].startswith(
        "as one process the script raises AssertionError: this script is for several ranks"
    )


@pytest.mark.sweep
def test_a_script_that_starts_its_ranks_and_ends_early(tmp_path: Path) -> None:
    ran, case = run(tmp_path, STARTS_ITS_RANKS, torchrun=False)
    assert (ran.returncode, case["verdict"], case["case"]["world"]) == (5, "unknown", 2)
    reasons = {c["check"]: c.get("reason", "") for c in case["checks"]}
    assert reasons["outcome"].startswith("the job ended after step 2, before 4 steps were recorded")
    gradients = [c for c in case["checks"] if c["check"] == "gradients"]
    assert [(c["verdict"], c["compared"]["ranks"]) for c in gradients] == [("pass", 2)] * 2


@pytest.mark.sweep
def test_a_script_that_resumes_is_replayed_from_the_same_snapshot(tmp_path: Path) -> None:
    """What the replay writes is in its copy: the log has the job's own lines alone."""
    for first, written in ((0, "012"), (3, "012345")):  # a job is ended within its last step
        ran, case = run(tmp_path, RESUMES)
        assert (ran.returncode, case["verdict"]) == (0, "pass"), f"from {first}: {ran.stdout}"
        assert (tmp_path / "log.txt").read_text().split() == list(written)
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "log.txt", "report.json", "snapshot.pt", "train.py",
        ]  # fmt: skip


SLEEPS = (
    BASE
    + """
import time

def after(step, model):
    open(f"pid-{os.getpid()}", "w").close()
    time.sleep(600)

train(4, after=after)
"""
)


@pytest.mark.sweep
def test_an_interrupted_job_leaves_no_rank_behind(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SLEEPS)
    words = [sys.executable, "-m", "distcheck", "job", "--nproc", "2", "--", sys.executable]
    started = subprocess.Popen(
        [*words, "train.py"], cwd=tmp_path, text=True, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    try:
        wait_until(lambda: len([*tmp_path.glob("pid-*")]) == 2)
        ranks = [int(file.name.removeprefix("pid-")) for file in tmp_path.glob("pid-*")]
        started.send_signal(signal.SIGINT)
        _, errors = started.communicate(timeout=120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
    assert started.returncode == 130, errors
    assert len(ranks) == 2
    assert not any(psutil.pid_exists(rank) for rank in ranks)


@pytest.mark.parametrize(
    ("words", "script", "expected"),
    [
        (["-S"], "print('here')", "start Python without -S, -E and -I"),
        ([], "print('here')", "no process of the command imported torch"),
    ],
)
def test_an_unseen_command(words: list[str], script: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script)
    ran = warm.run("job", "--", sys.executable, *words, "train.py", cwd=tmp_path, timeout=60)
    assert ran.returncode == 5
    assert ran.stdout == "here\n"
    assert expected in said(ran)


SHOW = """
import sys
from distcheck.job.inside import start
sys.excepthook = lambda *_: None
start._note_what_ends_it(sys.argv[1])
class ChildFailedError(Exception): pass
class ProcessRaisedException(Exception): pass
raise {error}
"""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("KeyError('lr')", ((0, "KeyError: 'lr'"),)),
        ("RuntimeError('missing keys:\\n  a\\n  b')", ((0, "RuntimeError: missing keys:"),)),
        ("ChildFailedError('=====\\ntrain.py FAILED')", ()),  # what its rank raised is noted there
        ("ProcessRaisedException('\\n-- Process 1\\nTraceback\\nValueError: bad')",
         ((0, "ValueError: bad"),)),
    ],
)  # fmt: skip
def test_what_ended_a_process_is_one_line(error: str, expected: Any, tmp_path: Path) -> None:
    program = SHOW.replace("{error}", error)
    words = [sys.executable, "-c", program, str(tmp_path / "settings.json")]
    subprocess.run(words, cwd=tmp_path, timeout=60, check=False)
    found = running.noted_exceptions(tmp_path)
    assert tuple((one.rank, one.text) for one in found) == expected


_LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:68"


@pytest.mark.parametrize(
    ("raised", "exited", "world", "expected"),
    [
        ({1: _LOST}, {0}, 2, [0]),
        ({1: _LOST, 2: _LOST}, {0, 3}, 4, [0, 3]),
        ({1: _LOST}, {0, 1}, 2, [0]),  # exit handlers run after an exception, too
        ({1: _LOST}, set(), 2, []),  # rank 0 may have been killed
        ({1: _LOST, 2: _LOST}, {0}, 4, []),  # so may rank 3
        ({1: "ConnectionError: nccl: Connection closed by peer"}, {0}, 2, []),  # of the script
        ({1: "RuntimeError: Connection closed by peer"}, {0}, 2, []),
        ({1: _LOST, 2: "ValueError: bad"}, {0, 3}, 4, []),  # rank 2 is the cause
        ({0: _LOST, 1: _LOST}, {0, 1}, 2, []),
        ({}, {0, 1}, 2, []),
    ],
)
def test_a_rank_that_exited_early_is_named_only_if_it_is_known(
    raised: dict[int, str], exited: set[int], world: int, expected: list[int]
) -> None:
    ends = tuple(
        Outcome(rank=rank, outcome=RankEnd.RAISED, text=said) for rank, said in raised.items()
    )
    result = running.CommandResult(1, ends, exited=frozenset(exited))
    assert result.early_exits(world) == expected


def test_a_rank_with_fewer_batches_is_named(tmp_path: Path) -> None:
    """On gloo its peer raises, instead of waiting."""
    script = BASE + "\ntrain(2 + int(os.environ['RANK']))\ndist.destroy_process_group()\n"
    ran, case = run(tmp_path, script, "--keep-going")
    assert (ran.returncode, case["verdict"]) == (4, "fail")
    (cause,) = case["diagnosis"]
    assert cause["cause"] == "collective-mismatch"
    assert cause["evidence"] == "rank 0 exited without an exception while rank 1 communicated"
    assert "drop_last" in cause["suggestion"]
    assert " by peer" in str(case["outcomes"])


def test_a_secret_in_a_long_text_is_masked_before_the_text_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of a secret is not recognized."""
    monkeypatch.setenv("MY_TOKEN", "x0123456789y" * 3)
    program = SHOW.replace(
        "{error}", "ValueError('.' * 1970 + __import__('os').environ['MY_TOKEN'])"
    )
    words = [sys.executable, "-c", program, str(tmp_path / "settings.json")]
    subprocess.run(words, cwd=tmp_path, timeout=60, check=False)
    (noted,) = running.noted_exceptions(tmp_path)
    assert noted.text.endswith(".<$MY_TOKEN>")


MODES = """
import sys, torch
import torch.nn.functional as F
from distcheck.job.inside import hooks

class Listener:
    def __init__(self): self.heard = []
    def __getattr__(self, name):
        return lambda *given: self.heard.append(name)

listener = Listener()
hooks.install(listener, lambda: sys.exit(9))
torch.set_default_device("cpu")
model = torch.nn.Linear(3, 2)
F.cross_entropy(model(torch.ones(4, 3)), torch.zeros(4, dtype=torch.int64)).backward()
print([name for name in listener.heard if name in ("losses", "backward", "target")])
"""


ALONE = """
import torch
model = torch.nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(4, 6)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("restarts", [0, 1])
def test_processes_that_are_all_rank_0_are_not_judged(restarts: int, tmp_path: Path) -> None:
    """A rank that torchrun starts again after a failure is another matter: the first is judged."""
    script, folder = tmp_path / "train.py", tmp_path / "job"
    script.write_text(ALONE)
    folder.mkdir()
    file = settings.write(JobSettings(steps=2), folder)
    for start in (0, restarts):
        variables = {"TORCHELASTIC_RESTART_COUNT": str(start)}
        worlds._ended([worlds._forked(script, (), file, variables)], folder)
    assert [one.name for one in folder.glob("rank-*")] == ["rank-0000"]
    if restarts:
        running.check_recorded(folder, running.CommandResult(0, ()), ("python",))
        return
    with pytest.raises(DistcheckError, match="several processes of the command train as rank 0 of"):
        running.check_recorded(folder, running.CommandResult(0, ()), ("python",))


def test_a_loss_is_heard_once_under_a_mode_of_torch(tmp_path: Path) -> None:
    """torch.set_default_device has torch call its own functions again, by their public names."""
    ran = warm.run(MODES, cwd=tmp_path, program="-c")
    assert ran.stdout.strip() == "['target', 'losses', 'backward']", ran.stdout + ran.stderr


CHECKPOINTS = """
import sys, torch
from torch.utils.checkpoint import checkpoint
from distcheck.job.inside import hooks

class Listener:
    def __init__(self): self.heard = []
    def __getattr__(self, name):
        return lambda *given: self.heard.append(name)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.part = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
    def forward(self, x):
        return checkpoint(self.part, x, use_reentrant=sys.argv[1] == "reentrant")

listener = Listener()
hooks.install(listener, lambda: sys.exit(9))
Model()(torch.ones(4, 3, requires_grad=True)).sum().backward()
print([name for name in listener.heard if name in ("enters", "leaves", "backward")])
"""


@pytest.mark.parametrize("kind", ["reentrant", "not"])
def test_parts_that_are_computed_again_in_backward_are_no_pass(kind: str, tmp_path: Path) -> None:
    """Activation checkpoints call parts of the model while gradients are computed."""
    ran = warm.run(CHECKPOINTS, kind, cwd=tmp_path, program="-c")
    assert ran.stdout.strip() == "['enters', 'leaves', 'backward']", ran.stdout + ran.stderr
