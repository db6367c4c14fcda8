"""Paired timings: ours and the peer's in turns, so that both meet the same machine."""

import statistics
import subprocess
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
