"""Two recordings of one training: where they part, and whether that is more than rounding.

walk        both from the first step to the last, in the order in which ranks computed them
yardstick   how far two right runs of a job may part: what moving each parameter by one ULP does
modules     which module is given the same, and makes another thing of it
ops         which operator is given the same bits, and makes others of them
jobs        two recordings of jobs: which step goes with which, and the walk with that yardstick
"""
