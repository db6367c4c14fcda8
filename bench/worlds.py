"""A trivial test in a world of ranks: ours beside the field's own ways, in one run.

Every test is one all_reduce of one number over gloo. The peers are torch's own test harnesses
(MultiProcessTestCase, MultiProcContinuousTest; under unittest, and the cheaper one under pytest as
well, as torch's CI runs it and as ours run), `mp.spawn` per test, a pool of spawned processes
as DeepSpeed's tests use it (kept, or new for every test), and an MPI program per test where
mpi4py and mpiexec are installed. What the plugin spends once on making its forks cheap
(docs/decisions/testing.md) is spread over the 100 tests that are timed.

    python bench/worlds.py [RANKS ...]
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


def ours(size: int, tests: int, *, reuse: bool, processes: int = 0) -> float:
    """Seconds of a pytest run of so many tests."""
    folder = Path(tempfile.mkdtemp())
    (folder / "test_ours.py").write_text(OURS.format(size=size, reuse=reuse, tests=tests))
    options = ["-n", str(processes)] if processes else []
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
    """Prints what pytest-xdist does to 32 tests."""
    for processes in (0, 1, 2, 4, 8):
        spent = sorted(ours(4, 32, reuse=False, processes=processes) for _ in range(ROUNDS))
        print(
            f"32 tests at world 4, -n {processes}: {statistics.median(spent):.2f} s "
            f"({spent[0]:.2f} to {spent[-1]:.2f})",
            flush=True,
        )


if __name__ == "__main__":
    for wanted in [int(word) for word in sys.argv[1:]] or [4, 2, 8, 16, 32]:
        compare_worlds(wanted)
    cold_start()
    many_processes()
