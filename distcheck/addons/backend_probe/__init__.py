"""Conformance test of a communication backend: calls every operation in worlds of ranks and
compares the results with exact expected values.

    patterns     input values and their exact reductions, as plain Python numbers
    scene        the buffers of one call, before and after
    operations   each probed operation: its inputs, its call, its expected results
    rank         runs in a rank: performs calls and compares their results
    command      runs the worlds
    table        prints and stores the results
"""
