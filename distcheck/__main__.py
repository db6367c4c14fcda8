"""`python -m distcheck` is the console script `distcheck`."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the current folder, whose random.py would shadow Python's
    from distcheck.cli import main

    main()
