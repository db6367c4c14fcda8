"""`distcheck compare`: compares two recordings, of the same cases or of two jobs, or two files of
log-probabilities.

`command` is the entry point. `traces` compares two recordings in a process with torch, and derives
the maximum difference between two correct results of one computation. `jobs` does the same for two
jobs, `records` decides the verdict, and `screen` prints it. `scoring` (`distcheck.scores`) writes
files of log-probabilities, and `scores` judges two of them.
"""
