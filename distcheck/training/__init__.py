"""The training loop of a rank: the shard it reads, the code it calls, and the trace it records.

jobs           requests of the front end to such processes; rank runs them
loading        resolves a name to a strategy or workload; loaded: the resolved object's interface
building       the model, data and optimizer, identical in every rank and every reference
loop           forward, backward, gradient synchronization, optimizer step
losses         the loss of a shard, as code under test computes it; outputs: of the model
adapters/      calls code that does not use distcheck's interface
recorder       records the values that the checks need, during the loop
leaf_hooks     a gradient as backward computed it
whole_tensors  contiguous copies of tensors, however they are stored; optimizers: their state
delays         delays one rank intentionally
"""
