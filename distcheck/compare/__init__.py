"""`distcheck compare`: two recordings of one training, of the same cases or of two jobs.

`command` is the entry point. `traces` compares two recordings in a process with torch, and derives
the maximum difference between two correct results of one computation; `jobs` does so for two jobs,
`records` decides the verdict, `screen` prints.
"""
