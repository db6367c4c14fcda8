"""The conformance test of a communication backend: every operation, in real worlds of ranks.

Inputs and expected results are plain Python numbers (`patterns`, `scene`), `operations` defines
each operation, `rank` performs and judges them, `command` runs the worlds, and `table` prints and
stores the results.
"""
