"""Cases per second of `distcheck explore` over those of a bare kept world, on the same cases.

The bare world is kept as well: the same ranks train the same cases with the same strategy, one
after the other, and nobody draws, records or judges anything. Start-up is left out of both.

    python bench/explore.py [STRATEGY] [CASES]
"""

import statistics
import sys
import time

from distcheck.addons.explore.running import Runner
from distcheck.addons.explore.search import Search
from distcheck.addons.explore.space import cases
from distcheck.worlds.pool import Pool

ROUNDS = 5


def explored(runner: Runner, strategy: str, most: int, seed: int) -> tuple[Search, float]:
    """A search, and the seconds that it took."""
    begun = time.perf_counter()
    until = time.monotonic() + 3600
    space = cases(strategy)
    search = Search(runner=runner, space=space, seed=seed, until=until, most_cases=most)
    search.run()
    if len(search.passed) < most:
        sys.exit(f"{len(search.passed)} of {most} cases passed; a benchmark needs right code")
    return search, time.perf_counter() - begun


def bare(runner: Runner, search: Search) -> float:
    """Seconds to train the same cases."""
    begun = time.perf_counter()
    for case in search.cases:
        runner.train(case)
    return time.perf_counter() - begun


def main(strategy: str = "allreduce", most: str = "100") -> None:
    """Prints the median ratio with its range."""
    pool = Pool()
    runner = Runner(pool)
    explored(runner, strategy, 25, 1000)  # starts the worlds
    ratios, rates = [], []
    for seed in range(ROUNDS):
        search, ours = explored(runner, strategy, int(most), seed)
        peer = bare(runner, search)
        ratios.append(peer / ours)
        rates.append(int(most) / ours)
    print(
        f"distcheck explore {strategy} / a bare kept world: {statistics.median(ratios):.2f} of its "
        f"cases per second ({min(ratios):.2f} to {max(ratios):.2f} over {ROUNDS} rounds of {most} "
        f"cases; aim: at least 0.5); {statistics.median(rates):.1f} cases per second"
    )
    runner.close()
    pool.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
