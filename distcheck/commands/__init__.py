"""One file per command, named as it is: its `command` is what click calls.

A file imports nothing heavy at its top: `distcheck --help` reads them all.
"""

# In the order of `distcheck --help`.
COMMANDS = (
    "verify",
    "plan",
    "merge",
    "replay",
    "recheck",
    "report",
    "record",
    "compare",
    "bundle",
    "explore",
    "list",
    "train",
    "doctor",
    "backends",
    "selftest",
)
