"""`distcheck compare`: two recordings of one training: of the same cases, or of two jobs.

`command` is the story. `traces` walks through two recordings, in a process with torch in it, and
derives how far two results of one computation may be apart; `jobs` has it walk through those of two
jobs, `records` decides, `screen` prints.
"""
