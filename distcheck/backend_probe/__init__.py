"""The conformance test of a communication backend: every operation, in real worlds of ranks.

Inputs and expectations are plain Python numbers (`patterns`, `scene`), `operations` says what
each is, `rank` performs and judges them, `sweep` runs the worlds, `table` and `document` show the
end.
"""
