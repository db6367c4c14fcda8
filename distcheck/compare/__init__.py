"""`distcheck compare`: two saved runs of the same cases compared with each other.

`command` is the story, `pairing` says which cases go together, `traces` compares two traces in a
process with torch in it, `differing` says how far two results of one computation may be apart,
`screen` prints.
"""
