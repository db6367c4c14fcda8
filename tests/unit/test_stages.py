"""The stages of a pipeline: together they are the network, nn.Sequential or not."""

import pytest
import torch
from distcheck_strategies.pipeline import layers_of
from torch import nn

from distcheck.workloads.vgg11 import VGG11


@pytest.mark.parametrize("stages", [2, 4])
def test_the_stages_of_vgg11_are_vgg11(stages: int) -> None:
    model = VGG11(10).eval()
    parts = [layers_of(model, stage, stages) for stage in range(stages)]
    weights = [parameter for part in parts for parameter in part.parameters()]
    assert [id(weight) for weight in weights] == [id(weight) for weight in model.parameters()]
    assert not any(isinstance(part[0], nn.ReLU) for part in parts)
    inputs = torch.rand(2, 3, 32, 32)
    assert torch.equal(nn.Sequential(*parts)(inputs), model(inputs))


def test_a_network_that_is_not_a_chain_is_refused() -> None:
    class Another(VGG11):
        def __init__(self) -> None:
            super().__init__(10)
            self.between = nn.Dropout()

    with pytest.raises(ValueError, match=r"this model is a Another with 0 in a chain"):
        layers_of(Another(), 0, 2)
