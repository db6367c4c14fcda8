"""`distcheck selftest`: checks that the tool detects all planted errors, and nothing else, on this
machine.

`command` lists the installed mutants and strategies (in a separate process), selects, runs and
judges them; `table` prints. The mutants and the expected results are in the package
`distcheck_mutants`, which the tests run as well.
"""
