"""`distcheck selftest`: whether the tool catches what it must, and nothing else, on this machine.

`zoo` (in a process of its own) lists what is installed, `planning` chooses from it, `running` runs
and judges, `table` shows, `command` is around them. The mutants and what is expected of them are
the package `distcheck_mutants`, which the tests run as well.
"""
