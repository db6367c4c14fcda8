"""Worlds whose ranks are threads of one process, of which exactly one runs at a time.

A collective is checked when it is posted, and computed when the last of its ranks has posted it, in
one of the reduction orders of `backends/simulated`. A world may therefore have more ranks than this
machine has cores or memory for, mismatched calls are found at once, and a deadlock is detected
without a deadline.

share.py           the front end's side: one process that runs all ranks
host.py            that process: runs the job of every rank, and reports how each ends
search.py          the process that tries schedules, each in a fork of itself
scheduler.py           cooperative scheduler of the threads; sleep takes no time
schedules.py       the schedules of a search, and the next rank under a schedule
world.py           the ranks of this process, their calls, whether calls of one group match, and
    how their world ends
group.py           the process group
calls.py           a posted call, and its place in the source
collectives.py     the results of each collective, from the inputs of all ranks
work.py            a started call, and the wait for it
in_flight.py       tensors that a call still reads or writes
groups.py          the groups that ranks create: whether they agree, and whether they are destroyed
suspicious_calls.py       calls that gloo accepts, and that are rarely intended
store.py           the store for the rendezvous
isolation.py       state that ranks in one process would share and processes do not: RNGs, and
    settings of Python and torch
patches.py         attributes that code sets in modules shared by all ranks
owned.py           further state that a job declares to be per rank
limits.py          operations that the code under test must not use there
"""
