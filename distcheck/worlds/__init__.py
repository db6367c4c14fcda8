"""How ranks come to exist, are watched, and end.

world.py         one world of ranks: linger, deadline, blame, calls that do not match
launch.py        starting a world of ranks, or a lone job
pool.py          what ranks are forked from here: the helper, and further interpreters
worker_pool.py   processes that stay from request to request
jobs.py          what a process can be asked to do: the type of a job, and no job
reporter.py      a forked process's line to the front
messages.py      what front, helper and children say to each other; framing.py how it travels
rendezvous.py    how the ranks of a world find each other
shares.py        the ranks of a world that live in one place
surroundings.py  what differs between ranks in several interpreters: machines, environment, delays

stalls.py        telling a hung rank from a slow machine
waiting.py       whether a rank waits, and in which of its calls
call_recorder.py      what those calls are; flight.py: torch's own record of them
callers.py       whose code a file is, and the line that called
proofs.py        what proves by them that a world can go no further
call_log.py      the latest calls in shared memory, for ranks that a library ends
root_cause.py         how each rank ended, and which end was the cause
interrupts.py    Ctrl-C and SIGTERM
turns.py         how many worlds run at once under pytest-xdist
scratch.py       folders that go even where the process that made them is killed
linux.py         the few Linux calls that Python does not wrap

local/           ranks on this machine: the helper that imports torch once and forks everything
                 else, the front's side of it, what a forked process does
remote/          ranks in processes that a launcher started, here or on other machines
mpi/             ranks of an MPI job that is started here
simulated/       ranks that are threads of one process
launchers/       which launcher has started this process, one file each
"""
