"""A conformance suite for any strategy, with a test for every property, world size and workload.

    pytest --pyargs distcheck.testing.conformance --distcheck-strategy my_sync.py:sync

`--distcheck-world` and `--distcheck-workload` may be repeated; by default the suite runs world
sizes 2, 3 and 4 on the workloads exact and cnn. Under xdist, `--dist loadgroup` runs the tests of
one verification in one process, so that the verification runs only once.
"""
