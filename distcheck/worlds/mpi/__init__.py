"""Ranks of an MPI job: an MPI launcher starts stand-ins, and the helper forks the ranks.

started     such a job, from its start to its end
stand_in    the program that the launcher starts in place of a rank
segments    files that Open MPI leaves in shared memory
"""
