"""Ranks of an MPI job: an MPI launcher starts stand-ins, and the helper forks the ranks."""
