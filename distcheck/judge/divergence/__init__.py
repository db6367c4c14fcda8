"""Two recordings of one training: where they part, and whether that is more than rounding.

lockstep        both from the first step to the last, in the order in which ranks computed them
noise_floor     distance between correct runs of a job: parameters perturbed by one ULP
modules         the first module whose inputs match and whose outputs diverge
job_recordings  two recordings of jobs: matching steps, the comparison by that noise floor, and the
                first operator whose inputs are bit-identical and whose outputs are not
"""
