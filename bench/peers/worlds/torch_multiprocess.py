"""torch's MultiProcessTestCase: processes are spawned for every test."""

import sys
import tempfile
import unittest

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase

SIZE, TESTS = int(sys.argv[1]), int(sys.argv[2])


class Trivial(MultiProcessTestCase):
    """As torch's own tests are written."""

    @property
    def world_size(self):
        return SIZE

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def body(self):
        store = dist.FileStore(self.file_name, SIZE)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=SIZE)
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == SIZE
        dist.destroy_process_group()


for number in range(TESTS):
    setattr(Trivial, f"test_{number}", lambda self: self.body())

if __name__ == "__main__":
    tempfile.tempdir = tempfile.mkdtemp()
    unittest.main(argv=sys.argv[:1])
