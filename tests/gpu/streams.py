"""Syncs whose mistakes only a GPU shows: what one stream has begun, another does not wait for.

Each wrong one stands beside its right twin.
"""

import torch
import torch.distributed as dist


def divides_before_it_waits(model, step):
    works = []
    for parameter in model.parameters():
        works.append(dist.all_reduce(parameter.grad, async_op=True))
        parameter.grad.div_(step.world_size)
    for work in works:
        work.wait()


def divides_after_it_has_waited(model, step):
    works = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]
    for work, parameter in zip(works, model.parameters(), strict=True):
        work.wait()
        parameter.grad.div_(step.world_size)


def a_stream_that_nobody_waits_for(model, step):
    with torch.cuda.stream(torch.cuda.Stream()):
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(step.world_size)


def a_stream_that_waits_and_is_waited_for(model, step):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(step.world_size)
            parameter.grad.record_stream(side)
    torch.cuda.current_stream().wait_stream(side)
