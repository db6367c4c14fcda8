"""Resources of this computer, and the settings and arithmetic that affect results bitwise.

seeds           RNG streams, and the settings that are pinned
numerics        arithmetic of each dtype: unit roundoff, smallest number, gamma(k)
devices         placement of tensors; resources: available cores and memory
shared_tensors  tensors in files and shared memory; sealed_memory: memory of fixed size
compat          private names of torch that have no public equivalent
"""
