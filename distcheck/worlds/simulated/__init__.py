"""Worlds whose ranks are threads of one process; `backends/simulated` is what they run on.

share.py           the front's side: one process that stands for all ranks
host.py            what that process does: it runs the job of every rank, and says how each ends
search.py          the process that tries schedules, each in a fork of itself
rounds.py          which schedules it tries
isolation.py       what ranks in one process would share, and processes do not
random_numbers.py  of that, the generators
settings.py        of that, the settings of Python and torch
patches.py         of that, what code sets in modules that all ranks share
owned.py           what a job adds to that
limits.py          what the code under test may not do there
"""
