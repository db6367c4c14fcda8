"""A layer that is split by rows, and samples that lie at its ReLU's kink."""

import torch

from tests.mutants.small import Points, Small

_EVERY = 32


class _AtAKink(Points):
    """In one of 32 samples, two numbers add up to a third: summed in one order they give 0, and in
    another what was rounded away.
    """

    def read(self, ids, *, train, dtype):
        inputs, labels = super().read(ids, train=train, dtype=dtype)
        chosen = ids % _EVERY == 0
        inputs[chosen] *= 0.7  # more digits than a sum keeps
        inputs[chosen, 7] = inputs[chosen, 0] + inputs[chosen, 6]
        return inputs, labels


class AtAKink(Small):
    """The first unit's input is x0 + x6 - x7: two ranks have x0, and x6 - x7."""

    def samples(self):
        return _AtAKink()

    def model(self, *, sample_shape, classes):
        model = super().model(sample_shape=sample_shape, classes=classes)
        with torch.no_grad():
            model[0].weight[0] = 0.0
            model[0].weight[0, [0, 6]] = 1.0
            model[0].weight[0, 7] = -1.0
            model[0].bias[0] = 0.0
        return model

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.0)  # so that it stays there
