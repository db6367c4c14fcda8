"""`python -m distcheck` is the console script `distcheck`."""

from distcheck.cli import main

if __name__ == "__main__":
    main()
