"""Worlds whose ranks are threads of one process, of which exactly one runs at a time.

A collective is compared when it is posted, and computed when the last of its ranks has posted it,
in one of the orders of `backends/simulated`. So a world may have more ranks than this machine has
cores or memory for, calls that do not match are found at once, and ranks that all wait are a
deadlock without any deadline.

share.py           the front's side: one process that stands for all ranks
host.py            what that process does: it runs the job of every rank, and says how each ends
search.py          the process that tries schedules, each in a fork of itself

scheduler.py           threads of which one runs at a time; sleep takes no time
schedules.py       which rank runs next, under a schedule; which schedules a search tries
world.py           the ranks of this process, what each has called, whether calls of one group
                   match, and how their world ends
group.py           the process group
calls.py           what a rank has called, and where
collectives.py     what each collective leaves, from what every rank gave
work.py            a started call, and waiting for it
in_flight.py       tensors that a call still reads or writes
groups.py          the groups that ranks make: whether the same, and whether they destroy them
suspicious_calls.py       calls that gloo takes, and that are rarely meant
store.py           the store at which ranks meet

isolation.py       what ranks in one process would share, and processes do not: generators, and
                   settings of Python and torch
patches.py         of that, what code sets in modules that all ranks share
owned.py           what a job adds to that
limits.py          what the code under test may not do there
"""
