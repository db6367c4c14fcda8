"""torch's MultiProcContinuousTest: processes and group are kept for a class of tests.

As a program, under unittest; or under pytest, as torch's own CI runs it.
"""

import os
import sys
import unittest

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcContinuousTest

SIZE, TESTS = int(os.environ["SIZE"]), int(os.environ["TESTS"])


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
