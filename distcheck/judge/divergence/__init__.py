"""Finds the first divergence of two recordings of one training, and decides if it exceeds rounding.

lockstep        both recordings in execution order, from the first step to the last
noise_floor     the noise floor of a job: the effect of perturbing each parameter by one ULP
modules         the first module whose inputs match and whose outputs diverge
job_recordings  two recordings of jobs: matching steps, comparison with that noise floor, and the
                first operator whose inputs are bit-identical and whose outputs are not
"""
