"""Resources of this computer, and the settings and arithmetic that change bits.

seeds           random streams, and the settings that are pinned
numerics        arithmetic of each dtype: unit roundoff, smallest number, gamma(k)
devices         placement of tensors; resources: cores and memory that may be used
shared_tensors  tensors in files and shared memory; sealed_memory: memory of fixed size
compat          names of torch that have no public counterpart
"""
