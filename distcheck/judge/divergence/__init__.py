"""Two recordings of one training: where they part, and whether that is more than rounding.

lockstep    both from the first step to the last, in the order in which ranks computed them
noise_floor  how far two right runs of a job may part: what moving each parameter by one ULP does
modules     which module is given the same, and makes another thing of it
job_recordings  two recordings of jobs: which step goes with which, the walk with that noise floor,
                and
            the first operator whose inputs are bit-identical and whose outputs are not
"""
