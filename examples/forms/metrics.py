"""Metrics that exchange: an object with `update` and `compute`.

Each rank updates it with its own samples, in stretches of unlike sizes, and computes. Every rank must
get what one process gets of all samples. `update(features, labels)` is given [n, 8] numbers and n
classes, `update(value)` n numbers. A world of 3 has shards of unlike sizes.

$ distcheck verify --strategy examples/forms/metrics.py:Accuracy --as metric --world 3
PASS

The mean of the ranks' accuracies, whatever each has seen:

$ distcheck verify --strategy examples/forms/metrics.py:MeanOfAccuracies --as metric --world 3
FAIL unweighted-mean

The result of a rank's own samples:

$ distcheck verify --strategy examples/forms/metrics.py:OfOwnSamples --as metric --world 3
FAIL missing-sync
"""

import torch
import torch.distributed as dist


class Accuracy:
    def __init__(self):
        self.right = torch.zeros(())
        self.seen = torch.zeros(())

    def update(self, features, labels):
        self.right = self.right + (features.argmax(1) == labels).sum()
        self.seen = self.seen + len(labels)

    def compute(self):
        both = torch.stack([self.right, self.seen])
        dist.all_reduce(both)
        return both[0] / both[1]


class MeanOfAccuracies(Accuracy):
    def compute(self):
        mean = self.right / self.seen
        dist.all_reduce(mean)
        return mean / dist.get_world_size()


class OfOwnSamples(Accuracy):
    def compute(self):
        return self.right / self.seen
