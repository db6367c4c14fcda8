"""Other routes than an all-reduce: rings, trees, hypercubes, hierarchies, servers."""

import torch
import torch.distributed as dist

from . import right


def _weighted(model, step):
    """Gradients whose sum over ranks is the mean over samples."""
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.mul_(step.weight / step.world_size)
    return [parameter.grad for parameter in model.parameters()]


def _swap(tensor, to, source):
    came = torch.empty_like(tensor)
    for work in [dist.isend(tensor, to), dist.irecv(came, source)]:
        work.wait()
    return came


@right
def ring_of_whole_tensors(model, step):
    """Every rank's tensor goes round; each adds up what passes. Then rank 0's sum for all."""
    right_, left = (step.rank + 1) % step.world_size, (step.rank - 1) % step.world_size
    for gradient in _weighted(model, step):
        passing = gradient.clone()
        for _ in range(step.world_size - 1):
            passing = _swap(passing, right_, left)
            gradient.add_(passing)
        dist.broadcast(gradient, 0)


@right
def ring_the_other_way(model, step):
    """To the left, in chunks, reduce-scatter and then all-gather."""
    world, rank = step.world_size, step.rank
    for gradient in _weighted(model, step):
        flat = gradient.contiguous().view(-1)
        chunks = list(flat.tensor_split(world))
        for turn in range(world - 1):
            sent, got = (rank + turn) % world, (rank + turn + 1) % world
            came = torch.empty_like(chunks[got])
            works = [dist.isend(chunks[sent].clone(), (rank - 1) % world)]
            works.append(dist.irecv(came, (rank + 1) % world))
            for work in works:
                work.wait()
            chunks[got].add_(came)
        for turn in range(world - 1):
            sent, got = (rank - 1 + turn) % world, (rank + turn) % world
            came = torch.empty_like(chunks[got])
            works = [dist.isend(chunks[sent].clone(), (rank - 1) % world)]
            works.append(dist.irecv(came, (rank + 1) % world))
            for work in works:
                work.wait()
            chunks[got].copy_(came)
        gradient.copy_(flat.view_as(gradient))


@right
def chain(model, step):
    """From rank to rank, each adds its own; the last one sends the sum."""
    for gradient in _weighted(model, step):
        if step.rank > 0:
            came = torch.empty_like(gradient)
            dist.recv(came, step.rank - 1)
            gradient.add_(came)
        if step.rank < step.world_size - 1:
            dist.send(gradient, step.rank + 1)
        dist.broadcast(gradient, step.world_size - 1)


@right
def binary_tree(model, step):
    """Up a binary tree and down again, for any world."""
    for gradient in _weighted(model, step):
        span = 1
        while span < step.world_size:
            if step.rank % (2 * span) == 0 and step.rank + span < step.world_size:
                came = torch.empty_like(gradient)
                dist.recv(came, step.rank + span)
                gradient.add_(came)
            elif step.rank % (2 * span) == span:
                dist.send(gradient, step.rank - span)
            span *= 2
        while span > 1:
            span //= 2
            if step.rank % (2 * span) == 0 and step.rank + span < step.world_size:
                dist.send(gradient, step.rank + span)
            elif step.rank % (2 * span) == span:
                dist.recv(gradient, step.rank - span)


@right
def hypercube_with_remainder(model, step):
    """Recursive doubling over the largest power of two; the others hand in and get back."""
    power = 1
    while power * 2 <= step.world_size:
        power *= 2
    for gradient in _weighted(model, step):
        if step.rank >= power:
            dist.send(gradient, step.rank - power)
            dist.recv(gradient, step.rank - power)
            continue
        if step.rank + power < step.world_size:
            came = torch.empty_like(gradient)
            dist.recv(came, step.rank + power)
            gradient.add_(came)
        mask = 1
        while mask < power:
            peer = step.rank ^ mask
            came = _swap(gradient.clone(), peer, peer)
            gradient.copy_(gradient + came if step.rank < peer else came + gradient)
            mask *= 2
        if step.rank + power < step.world_size:
            dist.send(gradient, step.rank + power)


@right
class TwoLevels:
    """Within a pair, between the pairs' first ranks, and back within the pair."""

    def wrap(self, model):
        world = dist.get_world_size()
        pairs = [list(range(first, min(first + 2, world))) for first in range(0, world, 2)]
        self.pair, _ = dist.new_subgroups_by_enumeration(pairs)
        self.leaders = dist.new_group([pair[0] for pair in pairs])
        return model

    def sync(self, model, step):
        first = step.rank - step.rank % 2
        for gradient in _weighted(model, step):
            dist.reduce(gradient, first, group=self.pair)
            if step.rank == first:
                dist.all_reduce(gradient, group=self.leaders)
            dist.broadcast(gradient, first, group=self.pair)


@right
class MeshOfTwoDimensions:
    """Rows, then columns, where the world is even; else one row."""

    def wrap(self, model):
        ranks = list(range(dist.get_world_size()))
        half = len(ranks) // 2
        even = len(ranks) % 2 == 0 and half > 1
        rows = [ranks[:half], ranks[half:]] if even else [ranks]
        columns = [[r, r + half] for r in range(half)] if even else [[r] for r in ranks]
        self.row, _ = dist.new_subgroups_by_enumeration(rows)
        self.column, _ = dist.new_subgroups_by_enumeration(columns)
        return model

    def sync(self, model, step):
        for gradient in _weighted(model, step):
            dist.all_reduce(gradient, group=self.row)
            dist.all_reduce(gradient, group=self.column)


@right
def rotating_root(model, step):
    """Each parameter's root is another rank, and another one in every step."""
    for number, gradient in enumerate(_weighted(model, step)):
        root = (number + step.index) % step.world_size
        dist.reduce(gradient, root)
        dist.broadcast(gradient, root)


@right
def everyone_broadcasts(model, step):
    """Each rank broadcasts its own gradient in turn, and all add up."""
    for gradient in _weighted(model, step):
        total = torch.zeros_like(gradient)
        for rank in range(step.world_size):
            part = gradient.clone()
            dist.broadcast(part, rank)
            total += part
        gradient.copy_(total)


@right
def all_to_all_of_pieces(model, step):
    """Each rank gets its piece of every rank's gradient, adds up, and gathers the pieces."""
    for gradient in _weighted(model, step):
        length = -(-gradient.numel() // step.world_size)
        padded = torch.zeros(length * step.world_size).to(gradient)
        padded[: gradient.numel()] = gradient.reshape(-1)
        pieces = list(padded.view(step.world_size, length))
        came = [torch.empty_like(piece) for piece in pieces]
        dist.all_to_all(came, pieces)
        own = torch.stack(came).sum(0)
        dist.all_gather(pieces, own)
        gradient.copy_(torch.cat(pieces)[: gradient.numel()].view_as(gradient))


@right
def all_to_all_single(model, step):
    """The same with one tensor, whose splits are unequal."""
    for gradient in _weighted(model, step):
        parts = [len(p) for p in gradient.reshape(-1).tensor_split(step.world_size)]
        own = parts[step.rank]
        came = torch.empty(own * step.world_size).to(gradient)
        sent = gradient.reshape(-1).clone()
        dist.all_to_all_single(came, sent, [own] * step.world_size, parts)
        total = came.view(step.world_size, own).sum(0)
        pieces = [torch.empty(part).to(gradient) for part in parts]
        for rank, piece in enumerate(pieces):
            if rank == step.rank:
                piece.copy_(total)
            dist.broadcast(piece, rank)
        gradient.copy_(torch.cat(pieces).view_as(gradient))


@right
def reduce_scatter_and_all_gather(model, step):
    """One padded buffer for all gradients; torch's own pair of collectives."""
    gradients = _weighted(model, step)
    flat = torch.cat([g.reshape(-1) for g in gradients])
    length = -(-len(flat) // step.world_size)
    padded = torch.zeros(length * step.world_size).to(flat)
    padded[: len(flat)] = flat
    own = torch.empty(length).to(flat)
    dist.reduce_scatter_tensor(own, padded)
    dist.all_gather_into_tensor(padded, own)
    parts = padded[: len(flat)].split([g.numel() for g in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


@right
def gather_and_scatter(model, step):
    """The last rank gathers, adds up from its end, and scatters copies."""
    root = step.world_size - 1
    for gradient in _weighted(model, step):
        found = [torch.empty_like(gradient) for _ in range(step.world_size)]
        dist.gather(gradient, found if step.rank == root else None, root)
        copies = None
        if step.rank == root:
            copies = [sum(reversed(found)).clone() for _ in range(step.world_size)]
        dist.scatter(gradient, copies, root)


@right
def objects(model, step):
    """As pickled lists of tensors."""
    gradients = _weighted(model, step)
    everyone = [None] * step.world_size
    dist.all_gather_object(everyone, [g.clone() for g in gradients])
    for number, gradient in enumerate(gradients):
        gradient.copy_(sum(theirs[number] for theirs in everyone))


@right
def server_on_rank_1(model, step):
    """Rank 1, or rank 0 where it is alone, receives from any, adds up and sends back."""
    server = min(1, step.world_size - 1)
    for gradient in _weighted(model, step):
        if step.rank == server:
            came = {rank: torch.empty_like(gradient) for rank in range(step.world_size)}
            came[server] = gradient.clone()
            for rank in came:
                if rank != server:
                    dist.recv(came[rank], rank)
            gradient.copy_(sum(came.values()))
            for rank in came:
                if rank != server:
                    dist.send(gradient, rank)
        else:
            dist.send(gradient, server)
            dist.recv(gradient, server)


@right
def pairs_by_batch(model, step):
    """Every rank sends to every other in one batch of point-to-point operations."""
    others = [rank for rank in range(step.world_size) if rank != step.rank]
    for gradient in _weighted(model, step):
        own = gradient.clone()
        came = {rank: torch.empty_like(gradient) for rank in others}
        operations = [dist.P2POp(dist.isend, own, rank) for rank in others]
        operations += [dist.P2POp(dist.irecv, tensor, rank) for rank, tensor in came.items()]
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        came[step.rank] = own
        gradient.copy_(sum(came[rank] for rank in sorted(came)))
