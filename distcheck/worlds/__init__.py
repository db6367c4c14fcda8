"""Rank lifecycle: launch, supervision, shutdown.

world.py         one world of ranks: deadline, root cause, mismatched calls
launch.py        starts a world of ranks, or a single-process job
pool.py          the processes that fork ranks: the helper, and further interpreters
worker_pool.py   persistent processes that serve one request after another
jobs.py          the type of a job that a forked process can run, the connection of that process
                 to the front end, and the state that each rank of a simulated world owns
messages.py      messages between front end, helper and children; framing.py: their encoding
rendezvous.py    connects the ranks of a world
shares.py        the ranks of a world that run in the same place
surroundings.py  differences between ranks in several interpreters: machines, environment,
                 delays
stalls.py        distinguishes a hung rank from a slow machine
waiting.py       detects that a rank is blocked, and the call in which it is blocked
call_recorder.py records those calls; flight.py reads torch's flight recorder
pinning.py       pins sources of nondeterminism, such as clocks and seeds, in a process of a job
callers.py       classifies source files, and finds the line that made a call
proofs.py        proves that a world is deadlocked, from the reports of its blocked ranks
call_log.py      the latest calls in shared memory, for ranks that a library aborts
root_cause.py    the exit status of each rank, and the root cause
interrupts.py    handles Ctrl-C and SIGTERM
turns.py         limits the number of concurrent worlds under pytest-xdist
scratch.py       temporary folders that are removed even if their process is killed
linux.py         Linux calls that Python does not wrap
local/           ranks on this machine: the helper that imports torch once and forks everything
    else, its front-end handle, the lifecycle of a forked process
remote/          ranks in processes that a launcher started, here or on other machines
mpi_segments.py  files that Open MPI leaves in shared memory
launchers/       detects the launcher that started this process, one file each
"""
