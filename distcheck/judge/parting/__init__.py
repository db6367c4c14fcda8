"""Two recordings of one training: where they part, and whether that is more than rounding.

walk        both from the first step to the last, in the order in which ranks computed them
yardstick   how far two right runs of a job may part: what moving each parameter by one ULP does
modules     which module is given the same, and makes another thing of it
jobs        two recordings of jobs: which step goes with which, the walk with that yardstick, and
            the first operator whose inputs are bit-identical and whose outputs are not
"""
