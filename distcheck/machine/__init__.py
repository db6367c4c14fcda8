"""What this computer has, and the settings and arithmetic that change bits.

seeds           where randomness comes from, and the settings that are pinned
numerics        the arithmetic of each dtype: unit roundoff, smallest number, gamma(k)
devices         where tensors live; resources: how much of the machine may be used
shared_tensors  tensors in files and shared memory; sealed_memory: memory that none can resize
compat          names of torch that have no public counterpart
"""
