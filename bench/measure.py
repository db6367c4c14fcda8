"""Paired timings: ours and the peer's in turns, so that both meet the same machine."""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence


def wall_s(command: Sequence[str]) -> float:
    """Seconds of one run of a command; raises if it fails."""
    begun = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - begun


def compare(
    name: str, ours: Callable[[], float], peer: Callable[[], float], *, rounds: int, aim: float
) -> None:
    """Runs both in turns and prints the median ratio with its range."""
    pairs = [(ours(), peer()) for _ in range(rounds)]
    ratios = sorted(a / b for a, b in pairs)
    mine, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
    print(
        f"{name}: {statistics.median(ratios):.2f} (from {ratios[0]:.2f} to {ratios[-1]:.2f} over "
        f"{rounds} rounds; aim: at most {aim}); medians {mine:.3f} s over {theirs:.3f} s"
    )


def steps_s(command: Sequence[str]) -> float:
    """The seconds that a peer says it spent in its steps."""
    ran = subprocess.run(command, check=False, capture_output=True, text=True)
    if ran.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{ran.stderr}")
    return float(ran.stdout.split()[-1])


def compare_with_bare(
    name: str, ours: Callable[[], float], peers: Sequence[Sequence[str]], *, rounds: int, aim: float
) -> None:
    """Ours over the steps of the peers alone, and over the peers as whole programs."""

    def steps() -> float:
        return sum(map(steps_s, peers))

    def programs() -> float:
        begun = time.perf_counter()
        steps()
        return time.perf_counter() - begun

    compare(f"{name} / bare steps", ours, steps, rounds=rounds, aim=aim)
    compare(f"{name} / the same as whole programs", ours, programs, rounds=rounds, aim=aim)
