"""`distcheck selftest`: whether the tool catches what it must, and nothing else, on this machine.

`command` lists what is installed (in a process of its own), chooses from it, runs and judges it;
`table` shows. The mutants and what is expected of them are
the package `distcheck_mutants`, which the tests run as well.
"""
