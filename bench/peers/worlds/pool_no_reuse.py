"""A pool of spawned processes, new for every test, as DeepSpeed's tests do by default."""

import sys

from pool_reuse import run_tests

if __name__ == "__main__":
    size, tests = int(sys.argv[1]), int(sys.argv[2])
    for _ in range(tests):
        run_tests(size, 1)
