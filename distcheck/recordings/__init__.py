"""Recordings of ranks: the only input of checks, causes and comparisons.

recording     the interface of every recording: tensors and their digests, headers, steps
differing     pairs the entries of two recordings of one training, in execution order
traces/       written by the ranks of a verification: one file in shared memory, fixed layout
jobs/         written by the ranks of a training job: a folder, one file per step and rank
"""
