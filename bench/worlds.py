"""A trivial test in a world of ranks: ours beside the field's own ways, in one run.

Every test is one all_reduce of one number over gloo. The peers are torch's own test harnesses
(MultiProcessTestCase, MultiProcContinuousTest; under unittest, and the cheaper one under pytest as
well, as torch's CI runs it and as ours run), `mp.spawn` per test, a pool of spawned processes
as DeepSpeed's tests use it (kept, or new for every test), and an MPI program per test where
mpi4py and mpiexec are installed. What the plugin spends once on making its forks cheap
(docs/decisions/testing.md) is spread over the 100 tests that are timed.

Then 32 mixed tests (worlds of 2, 4 and 8; an exchange, some training, a verification) under
pytest-xdist, and how long they take with another number of worlds at a time.

    python bench/worlds.py [RANKS ... | turns]
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from distcheck.machine.resources import cores
from distcheck.worlds.turns import _LEAST_TURNS

ROUNDS = 3
PEERS = Path(__file__).parent.resolve() / "peers" / "worlds"
OURS = """
import pytest, torch, torch.distributed as dist

@pytest.mark.world({size}, reuse={reuse})
@pytest.mark.parametrize("number", range({tests}))
def test_trivial(world, number):
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == {size}
"""
MIXED_TESTS = 32
MIXED = """
import distcheck, pytest, torch, torch.distributed as dist

@pytest.mark.parametrize("number", range(4))
@pytest.mark.world([2, 4, 8])
def test_exchange(world, number):
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == world.size

@pytest.mark.parametrize("number", range(6))
@pytest.mark.world([2, 4, 8])
def test_training(world, number):
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        model(torch.randn(64, 256)).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world.size
        optimizer.step()
    sums = world.gather(sum(p.double().sum().item() for p in model.parameters()))
    assert len(set(sums)) == 1

@pytest.mark.parametrize("world_size", [2, 8])
def test_verification(world_size):
    distcheck.verify("allreduce", world=world_size, workload="mlp", steps=1).raise_for_verdict()
"""
# In the peer's place: this many worlds at a time, whatever the number of cores.
TURNS = """
from distcheck.worlds import turns

def pytest_configure(config):
    about = getattr(config, "workerinput", None)
    if about is not None:
        turns._LEAST_TURNS, turns.cores = {turns}, lambda: {turns}
"""


def ours(size: int, tests: int, *, reuse: bool) -> float:
    """Seconds of a pytest run of so many trivial tests."""
    return pytest_run({"test_ours.py": OURS.format(size=size, reuse=reuse, tests=tests)}, tests)


def mixed(processes: str, *, turns: int | None = None) -> float:
    """Seconds of a pytest run of the mixed tests, with another number of turns if that is given."""
    files = {"test_mixed.py": MIXED}
    if turns is not None:
        files["conftest.py"] = TURNS.format(turns=turns)
    return pytest_run(files, MIXED_TESTS, "-n", processes)


def pytest_run(files: dict[str, str], tests: int, *options: str) -> float:
    """Seconds of a run in a folder of these files; the program ends if not all pass."""
    folder = Path(tempfile.mkdtemp())
    for name, text in files.items():
        (folder / name).write_text(text)
    begun = time.perf_counter()
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options],
        cwd=folder, capture_output=True, text=True,
    )  # fmt: skip
    spent = time.perf_counter() - begun
    if f"{tests} passed" not in ran.stdout:
        sys.exit(ran.stdout + ran.stderr)
    shutil.rmtree(folder)
    return spent


def peer(name: str, size: int, tests: int) -> float:
    """Seconds of a peer's run of so many tests; "NAME pytest": under pytest, not our plugin."""
    name, _, under = name.partition(" ")
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "SIZE": str(size), "TESTS": str(tests),
    }  # fmt: skip
    words = [str(PEERS / f"{name}.py"), str(size), str(tests)]
    if under == "pytest":
        words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:distcheck", words[0]]
    begun = time.perf_counter()
    ran = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True)
    spent = time.perf_counter() - begun
    if ran.returncode:
        sys.exit(f"{name} failed:\n{ran.stdout}{ran.stderr}")
    return spent


def per_test(measure: Callable[[int], float], few: int, many: int) -> tuple[float, float, float]:
    """Median, least and most seconds that one more test costs: start-up cancels out."""
    found = sorted((measure(many) - measure(few)) / (many - few) for _ in range(ROUNDS))
    return statistics.median(found), found[0], found[-1]


PEERS_AT_4 = (
    ("torch_continuous", 2, 1002),
    ("torch_continuous pytest", 2, 1002),
    ("pool_reuse", 2, 102),
    ("pool_no_reuse", 1, 3),
    ("spawn_per_test", 1, 3),
    ("torch_multiprocess", 1, 3),
    ("mpiexec_per_test", 1, 3),
)


def compare_worlds(size: int) -> None:
    """Prints a table of seconds per test, and the ratio to ours."""
    fresh = per_test(partial(ours, size, reuse=False), 2, 102)
    kept = per_test(partial(ours, size, reuse=True), 2, 1002)
    rows = {"distcheck, fresh world": fresh, "distcheck, kept world": kept}
    for name, few, many in PEERS_AT_4 if size == 4 else ():
        if name != "mpiexec_per_test" or shutil.which("mpiexec"):
            rows[name] = per_test(partial(peer, name, size), few, many)
    print(f"world {size}: seconds per test (least to most of {ROUNDS})")
    if size == 4:
        print("  aims: over fresh, torch_multiprocess 100, spawn_per_test 40; over kept,")
        print("        torch_continuous 1")
    for name, (median, least, most) in rows.items():
        print(
            f"  {name:<25} {median:8.4f} ({least:.4f} to {most:.4f})"
            f"   over fresh {median / fresh[0]:7.1f}   over kept {median / kept[0]:7.1f}",
            flush=True,
        )


def cold_start() -> None:
    """Prints what the first test costs beside the import that it cannot do without."""
    ratios = []
    for _ in range(5):
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        importing = time.perf_counter() - begun
        ratios.append(ours(4, 1, reuse=False) / importing)
    print(
        "cold start, one test in a fresh world of 4 / import torch: "
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}; aim: 1.5)"
    )


def many_processes() -> None:
    """Prints what pytest-xdist does to the mixed tests."""
    spent: dict[str, list[float]] = {"1": [], "2": [], "auto": []}
    for _ in range(ROUNDS):
        for processes, found in spent.items():
            found.append(mixed(processes))
    _print_ratios(f"{MIXED_TESTS} mixed tests, -n", spent)


def numbers_of_turns() -> None:
    """Prints what the bound on worlds at a time does to the mixed tests in eight processes."""
    choices = {"1": 1, f"{own_turns()} (ours)": None, "4": 4, "8 (no bound)": 8}
    spent: dict[str, list[float]] = {name: [] for name in choices}
    for _ in range(ROUNDS):
        for name, turns in choices.items():
            spent[name].append(mixed("8", turns=turns))
    _print_ratios(f"{MIXED_TESTS} mixed tests, -n 8, worlds at a time", spent)


def own_turns() -> int:
    """How many there are where nothing else is said."""
    return max(_LEAST_TURNS, cores())


def _print_ratios(what: str, spent: dict[str, list[float]]) -> None:
    first = next(iter(spent.values()))
    for name, found in spent.items():
        ratios = sorted(mine / other for mine, other in zip(found, first, strict=True))
        print(
            f"{what} {name}: {statistics.median(found):.1f} s; over the first "
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
            flush=True,
        )


if __name__ == "__main__":
    if sys.argv[1:] == ["turns"]:
        many_processes()
        numbers_of_turns()
        sys.exit()
    for wanted in [int(word) for word in sys.argv[1:]] or [4, 2, 8, 16, 32]:
        compare_worlds(wanted)
    cold_start()
    many_processes()
    numbers_of_turns()
