"""Compressed gradients with a memory: the part that is not sent is added at the next step.

$ distcheck verify --strategy examples/forms/error_feedback.py:TopK --accept sparse:0.01 --world 4
PASS

$ distcheck verify --strategy examples/forms/error_feedback.py:TopKWithoutMemory --accept sparse:0.01 --world 4
FAIL wrong-error-feedback

$ distcheck verify --strategy examples/forms/error_feedback.py:TopKWithoutMemory --accept sparse:0.01:no-feedback --world 4
PASS

$ distcheck verify --strategy examples/forms/error_feedback.py:SharedRandomK --accept sparse:0.05:random --world 4
PASS

$ distcheck verify --strategy examples/forms/error_feedback.py:SharedRandomK --accept sparse:0.01:random --world 4
FAIL exceeds-accepted-deviation

$ distcheck verify --strategy examples/forms/error_feedback.py:ScaledSigns --accept error-feedback:sign --world 4
PASS

$ distcheck verify --strategy examples/forms/error_feedback.py:FourBits --accept error-feedback:quantized=4 --world 4
PASS

$ distcheck verify --strategy examples/forms/error_feedback.py:StochasticBlocks --accept quantized:8:block=64:stochastic --world 4
PASS
"""

import torch
import torch.distributed as dist


class Compressor:
    """Each rank compresses its gradient plus memory; all ranks average the results."""

    def __init__(self):
        self.memory = {}

    def compress(self, total):
        raise NotImplementedError

    def sync(self, model):
        for name, parameter in model.named_parameters():
            total = parameter.grad + self.memory.get(name, 0)
            sent = self.compress(total)
            self.memory[name] = self.rest(total, sent)
            dist.all_reduce(sent)
            parameter.grad = sent / dist.get_world_size()

    def rest(self, total, sent):
        return total - sent


class TopK(Compressor):
    """The largest hundredth of each tensor (Aji and Heafield, 2017)."""

    def compress(self, total):
        k = max(1, int(0.01 * total.numel()))
        places = total.flatten().abs().topk(k).indices
        sent = torch.zeros_like(total)
        sent.view(-1)[places] = total.flatten()[places]
        return sent


class TopKWithoutMemory(TopK):
    def rest(self, total, sent):
        return torch.zeros_like(total)


class SharedRandomK(Compressor):
    """The same random twentieth on every rank (Stich et al., 2018)."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(7)

    def compress(self, total):
        k = max(1, total.numel() // 20)
        places = torch.randperm(total.numel(), generator=self.generator)[:k]
        sent = torch.zeros_like(total)
        sent.view(-1)[places] = total.flatten()[places]
        return sent


class ScaledSigns(Compressor):
    """One bit per element, and the mean magnitude (Karimireddy et al., 2019)."""

    def compress(self, total):
        return total.abs().mean() * total.sign()


class FourBits(Compressor):
    """Integers from -7 to 7, times the largest magnitude / 7."""

    def compress(self, total):
        quantum = total.abs().max() / 7
        return (total / quantum).round().nan_to_num() * quantum


class StochasticBlocks(Compressor):
    """Eight bits, one scale per 64 elements, rounded at random: unbiased, so without a memory."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(dist.get_rank())

    def compress(self, total):
        flat = total.flatten()
        blocks = torch.nn.functional.pad(flat, (0, -len(flat) % 64)).view(-1, 64)
        quanta = blocks.abs().amax(1, keepdim=True) / 127
        draws = torch.rand(blocks.shape, generator=self.generator)
        sent = ((blocks / quanta).nan_to_num() + draws).floor() * quanta
        return sent.flatten()[: len(flat)].view_as(total)

    def rest(self, total, sent):
        return torch.zeros_like(total)
