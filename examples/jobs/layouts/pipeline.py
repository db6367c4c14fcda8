"""A pipeline of stages: PipelineStage and ScheduleGPipe, with tied embeddings.

torchrun --nproc-per-node 2 pipeline.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

WIDTH, LAYERS, VOCABULARY, LENGTH = 16, 4, 32, 8


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """The layers of one stage, by their number in the whole; the first and last one embed."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(number): Layer() for number in range(LAYERS)})

    def keep(self, stage, stages):
        each = LAYERS // stages
        for number in range(LAYERS):
            if number // each != stage:
                del self.layers[str(number)]
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        if not (self.is_first or self.is_last):
            self.embedding = None
        return self

    def forward(self, x):
        if self.is_first:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        return x @ self.embedding.weight.t() if self.is_last else x


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Net().keep(rank, world)
    stage = PipelineStage(model, rank, world, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    drawn = torch.Generator().manual_seed(1)
    for _ in range(10):
        tokens = torch.randint(0, VOCABULARY, (8, LENGTH + 1), generator=drawn)
        given = (tokens[:, :-1],) if rank == 0 else ()
        target = tokens[:, 1:] if rank == world - 1 else None
        losses = []
        schedule.step(*given, target=target, losses=losses)
        if world > 1 and model.embedding is not None:
            dist.all_reduce(model.embedding.weight.grad)
        optimizer.step()
        optimizer.zero_grad()
    if losses:
        print(f"loss {torch.stack(losses).mean().item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
