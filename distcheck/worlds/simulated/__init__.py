"""Worlds whose ranks are threads of one process; `backends/simulated` is what they run on.

share.py      the front's side: one process that stands for all ranks
host.py       what that process does: it runs the job of every rank, and says how each ends
search.py     the process that tries schedules, each in a fork of itself
rounds.py     which schedules it tries
isolation.py  what ranks in one process would share, and processes do not
owned.py      what a job adds to that
limits.py     what the code under test may not do there
"""
