"""The parts that decide: what should have been, how far apart, and why.

oracles/     what each rank should have computed, one file per layer or accepted deviation
checks/      comparisons of a trace with an expectation
divergence/  two recordings of one training: the first divergence, and whether it exceeds rounding
diagnosis/   from failed checks to named causes
fitting      factors and weights by least squares, which causes of any command are named by
job          the job that judges some steps of a case, in a process of its own
sensitivity  which of the simplest mistakes a passing case would have shown
acceptance   what `--accept` allows in place of the exact mean
rerun_bisection  which difference between two worlds makes a rerun differ
"""
