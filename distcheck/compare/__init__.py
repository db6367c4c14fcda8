"""`distcheck compare`: compares two recordings, of the same cases or of two jobs.

`command` is the entry point. `traces` compares two recordings in a process with torch, and derives
the maximum difference between two correct results of one computation. `jobs` does the same for two
jobs, `records` decides the verdict, and `screen` prints it.
"""
