"""A job that was killed or interrupted leaves nothing, or nothing that the next one keeps."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from distcheck.job import copying, in_use, leftovers, running
from tests.waiting import is_written, wait_until
from tests.world.command import hear_interrupts

OWNER = """
import os, sys, time
from distcheck.job import leftovers
with leftovers.folder() as made:
    print(made, flush=True)
    time.sleep(600)
"""
RANK = """
import os, sys, time
from distcheck.job.inside import start
start.begin(sys.argv[1])
print("here", flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@contextlib.contextmanager
def started(program: str, *arguments: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """A process, and the first line that it prints."""
    words = [sys.executable, "-c", program, *arguments]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def test_the_next_job_removes_what_a_killed_one_left() -> None:
    with started(OWNER) as (owner, name):
        left = Path(name)
        (left / "recording").mkdir()
        (left / "recording" / "rank.json").touch()
        leftovers.clear()
        assert left.is_dir()  # it is in use
        with started(RANK, str(left / "recording" / "settings.json")) as (rank, said):
            assert said == "here"
            owner.kill()
            owner.wait()
            leftovers.clear()
            assert left.is_dir()  # a rank goes on
            rank.kill()
            rank.wait()
            with leftovers.folder() as mine:
                assert mine.is_dir()
                assert not left.exists()
    assert not mine.exists()


def marked(folder: Path) -> Path:
    folder.mkdir(mode=0o700)
    (folder / in_use.NAME).write_bytes(in_use.machine_boot_id())
    return folder


def test_what_is_not_a_left_folder_of_this_user_stays(temporary: Path) -> None:
    other = marked(temporary / "other")
    (temporary / "distcheck-job-link").symlink_to(other)
    (temporary / "distcheck-job-file").touch()
    (temporary / "distcheck-job-new").mkdir(mode=0o700)  # its mark is not there yet
    marked(temporary / "distcheck-job-shared").chmod(0o777)
    (marked(temporary / "distcheck-job-far") / in_use.NAME).write_bytes(b"another machine")
    by_link = temporary / "distcheck-job-by-link"
    by_link.mkdir(mode=0o700)
    (by_link / in_use.NAME).symlink_to(other / in_use.NAME)
    kept = sorted(temporary.iterdir())
    if os.geteuid() == 0:
        os.chown(marked(temporary / "distcheck-job-theirs"), 12345, 12345)
        kept = sorted(temporary.iterdir())
    left = marked(temporary / "distcheck-job-left")
    leftovers.clear()
    assert sorted(temporary.iterdir()) == kept
    assert not left.exists()


def test_what_a_shell_has_started_ends_with_the_job(tmp_path: Path) -> None:
    program = f"sleep 600 & echo $! > {tmp_path}/pid; wait"
    shell = subprocess.Popen(["sh", "-c", program])
    wait_until(lambda: is_written(tmp_path / "pid"))
    running._end_command(shell)
    below = int((tmp_path / "pid").read_text())
    assert is_gone(below)


def is_gone(process: int) -> bool:
    """Whether it has ended; this machine may have no process that takes note of it."""
    try:
        return str(psutil.Process(process).status()) == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_copy_does_not_hold_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where TMPDIR is within the folder that the job starts in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    target = tmp_path / "distcheck-job-1" / "copy"
    target.parent.mkdir()
    assert not copying.copy_project(target).missing
    assert [path.name for path in target.iterdir()] == ["train.py"]


MPI = """
import sys
from mpi4py import MPI
from distcheck.job.inside import ending
print(*{words[-1] for words in map(str.split, open("/proc/self/maps"))
        if words[-1].startswith("/dev/shm/")}, flush=True)
ending.exit_process()
"""


def test_the_shared_memory_of_mpi_goes_with_a_process_that_is_ended() -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed (the extra `mpi`)")
    ran = subprocess.run(
        [sys.executable, "-c", MPI], capture_output=True, text=True, timeout=60, check=True
    )
    segments = [name for name in ran.stdout.split() if "sm_segment" in name]
    if not segments:
        pytest.skip("this MPI keeps its shared memory elsewhere")
    assert not [name for name in segments if os.path.exists(name)]


DETACHES = """
import os, subprocess, sys, time
subprocess.Popen(["sleep", "600"], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        with open(sys.argv[1] + "/daemon", "w") as file:
            file.write(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
while not os.path.exists(sys.argv[1] + "/daemon"):
    time.sleep(0.01)
print(os.getpid(), file=open(sys.argv[1] + "/script", "w"))
if sys.argv[2] == "stays":
    time.sleep(600)
sys.exit(7)
"""


def replayed(folder: Path, how: str) -> "subprocess.Popen[bytes]":
    """A process that runs a script as a replay does."""
    (folder / "script.py").write_text(DETACHES)
    program = (
        "import sys; from pathlib import Path; from distcheck.job import running\n"
        "where = Path(sys.argv[1])\n"
        "words = [sys.executable, 'script.py', sys.argv[1], sys.argv[2]]\n"
        "ran = running.run_silently(words, where / 'settings.json', folder=where, variables={},"
        " without=('NOTHING_',), deadline_s=300.0)\nsys.exit(ran.code)"
    )
    words = [sys.executable, "-c", program, str(folder), how]
    return subprocess.Popen(words, preexec_fn=hear_interrupts)


def started_by(folder: Path) -> list[psutil.Process]:
    """What the script and what it started are called by the kernel, from its folder."""
    wait_until(lambda: is_written(folder / "script"))
    return [p for p in psutil.process_iter() if in_folder(p, folder)]


def in_folder(process: psutil.Process, folder: Path) -> bool:
    try:
        return Path(process.cwd()) == folder and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, OSError):
        return False


def test_what_a_replay_has_started_ends_with_it(tmp_path: Path) -> None:
    """Detached or not; and its end is the script's."""
    assert replayed(tmp_path, "ends").wait(120) == 7
    assert (tmp_path / "daemon").exists()
    assert started_by(tmp_path) == []


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_what_a_replay_has_started_ends_with_the_front(how: int, tmp_path: Path) -> None:
    front = replayed(tmp_path, "stays")
    family = started_by(tmp_path)
    assert len(family) >= 3, "the script, the daemon, and one that sleeps"
    front.send_signal(how)
    front.wait(60)
    _, alive = psutil.wait_procs(family, timeout=60)
    assert alive == []


SLEEPS_AS_ONE_PROCESS = """
import os, time, torch, torch.distributed as dist
import torch.nn.functional as F
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
drawn = torch.Generator().manual_seed(dist.get_rank())
for step in range(3):
    inputs, labels = torch.randn(4, 6, generator=drawn), torch.randint(0, 3, (4,), generator=drawn)
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
    if step == 1 and os.environ["WORLD_SIZE"] == "1":
        with open(os.environ["HERE"] + "/alone", "w") as file:
            file.write(f"{os.getpid()}\\n")
        time.sleep(600)
"""


@pytest.mark.sweep
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_job_that_is_ended_while_it_is_replayed(how: signal.Signals, tmp_path: Path) -> None:
    """Its replay ends, its folder goes; after SIGKILL with the next job."""
    (tmp_path / "train.py").write_text(SLEEPS_AS_ONE_PROCESS)
    words = [sys.executable, "-m", "distcheck", "job"]
    started = subprocess.Popen(
        [*words, "--steps", "3", "--nproc", "2", "--", sys.executable, "train.py"],
        cwd=tmp_path, env={**os.environ, "HERE": str(tmp_path)}, text=True, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    note = tmp_path / "alone"
    try:
        wait_until(lambda: is_written(note))
        started.send_signal(how)
        _, errors = started.communicate(timeout=120)
        alone = int(note.read_text())
        wait_until(lambda: is_gone(alone))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
    assert is_gone(alone)
    if how is signal.SIGKILL:
        (left,) = tmp_path.glob("distcheck-job-*")
        ran = subprocess.run([*words, "--", sys.executable, "-c", "1"], cwd=tmp_path, check=False)
        assert ran.returncode == 5
        assert not left.exists()
    else:
        assert started.returncode == 130, errors
    assert not [*tmp_path.glob("distcheck-job-*")]
