"""Sum every parameter's gradient over the ranks with MPI's own Allreduce, by mpi4py.

What an MPI program does that knows nothing of torch.distributed: the gradient's memory is handed
to MPI_Allreduce on COMM_WORLD. In which order MPI adds is the library's affair, so no order is
promised and is not compared bit for bit.
"""

from torch import nn

from distcheck.contract import Step, strategy


# numpy has neither bfloat16 nor sparse tensors; and a gradient is there on every rank, or on none.
@strategy(
    scale="divide-after",
    weighting="gradient",
    buffers="local",
    backend="mpi",
    declines=("mixed_dtypes", "sparse", "absent_on_some"),
)
def mpi_allreduce(model: nn.Module, step: Step) -> None:
    """Leaves the mean gradient over all samples of the step in every `parameter.grad`."""
    from mpi4py import MPI  # here, so that it can be listed where there is no MPI

    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient is None:  # frozen, or unused on every rank
            continue
        if step.weight != 1.0:  # unequal shards: weight each by its number of samples
            gradient.mul_(step.weight)
        summed = gradient.contiguous()  # MPI takes memory as it lies, whatever the strides
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, summed.numpy())
        gradient.copy_(summed).div_(step.world_size)
