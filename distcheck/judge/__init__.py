"""Judges runs: expectations, comparisons, and the causes of failures.

oracles/     the results that each rank should have, one file per layer or accepted deviation
checks/      comparisons of a trace with an expectation
divergence/  two recordings of one training: the first divergence, and if it exceeds rounding
diagnosis/   from failed checks to named causes
fitting      least-squares factors and weights, on which causes of all commands are based
job          the job that judges some steps of a case, in a separate process
sensitivity  the simplest mistakes that a passing case would have revealed
acceptance   deviations allowed by `--accept` in place of the exact mean
rerun_bisection  the difference between two worlds that changes a rerun
"""
