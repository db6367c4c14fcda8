"""A conformance suite for any strategy: a test for every property, world and workload.

    pytest --pyargs distcheck.testing.conformance --distcheck-strategy my_sync.py:sync

`--distcheck-world` and `--distcheck-workload` may be given several times; by default it runs
worlds 2, 3 and 4 on the workloads lattice and cnn. Under xdist, `--dist loadgroup` keeps the
tests of one verification together, so that it is made once.
"""
