"""torch's MultiProcContinuousTest: processes and group are kept for a class of tests."""

import sys
import unittest

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcContinuousTest

SIZE, TESTS = int(sys.argv[1]), int(sys.argv[2])


class Trivial(MultiProcContinuousTest):
    """As torch's own tests are written."""

    world_size = SIZE

    @classmethod
    def backend_str(cls):
        return "gloo"

    def body(self):
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == SIZE


for number in range(TESTS):
    setattr(Trivial, f"test_{number}", lambda self: self.body())

if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
