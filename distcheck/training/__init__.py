"""What runs in a rank: the one training loop, the shard it reads, and what it writes down.

jobs           what the front asks of such processes; rank carries that out
loading        from a name to a strategy or workload; loaded: what such a one has
building       the model, data and optimizer, alike in every rank and every reference
loop           forward, backward, exchange, the optimizer's step
losses         the loss of a shard, as code under test computes it; outputs: of the model
adapters/      calling code that was not written for distcheck; engines, scripts: two such kinds

recorder       writes down what the checks need, as the loop goes on
leaf_hooks     a gradient as backward computed it
whole_tensors  tensors as numbers in one memory, however they are kept; optimizers: their state
delays         a rank that is late on purpose
"""
