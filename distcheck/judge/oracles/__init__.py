"""What should have been: expectations, computed without the code they judge.

    shards.py        each rank's own part, again, from the state that rank recorded
    order_exact.py   X: the shards reduced in the very order that the contract names
    rounding.py      R: their mean, and how far any order may be from it
    full_batch.py    S64, S32: the whole batch in one process
    ghost_batch.py   BatchNorm in it, as the ranks have it
    lattice.py       integers in closed form
    calibration.py   whether the orders that X relies on hold on this machine
    expectation.py   all of one step; references.py has what is built once a process

Every step starts from what the ranks recorded before it: free-running trajectories diverge
chaotically, re-synchronised ones do not.
"""
