"""`distcheck selftest`: checks on this machine that distcheck detects planted bugs, and reports
nothing for correct code.

`command` lists the installed mutants and correct strategies (in a separate process), selects and
runs them, and judges the results; `table` prints them. The mutants and their expected results are
in the package `distcheck_mutants`, which the test suite uses as well.
"""
