"""Two recordings of one training: where they part, and whether that is more than rounding.

walk        both from the first step to the last, in the order in which ranks computed them
yardstick   how far two right runs of a job may part: what moving each parameter by one ULP does
jobs        two recordings of jobs: which step goes with which, and the walk with that yardstick
"""
