"""fairscale's ZeRO-2: OSS divides the optimizer, ShardedDDP reduces each gradient to its owner.

$ distcheck verify --strategy examples/frameworks/with_fairscale.py:initialize --world 2
PASS
"""

from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim.oss import OSS

from distcheck.contract import strategy


class Engine:
    def __init__(self, model, optimizer):
        self.optimizer = OSS(model.parameters(), optim=type(optimizer), **optimizer.defaults)
        self.model = ShardedDataParallel(model, self.optimizer)

    def __call__(self, inputs):
        return self.model(inputs)

    def backward(self, loss):
        loss.backward()

    def step(self):
        self.optimizer.step()

    def zero_grad(self):
        self.model.zero_grad()  # the optimizer's would cut gradients off from their buckets


@strategy(optimizer_state="sharded", gradients="owner", buffers="rank 0", one_group=True)
def initialize(model, optimizer):
    return Engine(model, optimizer)
