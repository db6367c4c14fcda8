"""How ranks come to exist, are watched, and end.

helper.py       the process that imports torch once and forks everything else
forks.py        what makes many forks cheap
child.py        what a forked process does before and after its job
scratch.py      folders that go even where the process that made them is killed
messages.py     what the three kinds of process say to each other
framing.py      how it travels
jobs.py         what a process can be asked to do: the type of a job, and no job
kept.py         processes that stay from request to request
pool.py         the front's side of the helper: start, kill, pump events
helper_watch.py noticing a helper that was stopped
interpreters.py further helpers, for ranks that are to share no process state
surroundings.py what differs between such ranks: interpreters, machines, environment, delays ...
noise.py        ... and what they allocate first
children.py     one forked process, as the front sees it
shares.py       the ranks of a world that live in one place
local_share.py  those on this machine
world.py        one world of ranks: linger, deadline, blame
turns.py        how many worlds run at once under pytest-xdist
stalls.py       telling a hung rank from a slow machine
rendezvous.py   how the ranks of a world find each other
fleet.py        a pool whose ranks are spread over processes that a launcher started ...
links.py        ... its end of the connections ...
host.py         ... and the process at the other end
wire.py         what the two say to each other
meeting.py      how they find each other
mpirun.py       an MPI job whose ranks are forked, with mpi_keeper.py and mpi_stand_in.py
"""
