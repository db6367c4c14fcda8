"""`--nnodes 2 --node-rank 0 --master-addr HOST --master-port PORT`: a share of ranks by hand."""

from distcheck.errors import UsageError
from distcheck.worlds.launchers.launch import Launch

NAME = "--nnodes"
OPTIONS = {
    "nnodes": "--nnodes",
    "machine": "--node-rank",
    "master_addr": "--master-addr",
    "master_port": "--master-port",
    "init_method": "--init-method",
}
_DEFAULT_PORT = 29500  # torchrun's


def launch_here(
    *,
    nnodes: int,
    machine: int | None,
    master_addr: str | None,
    master_port: int | None,
    init_method: str | None,
    world: int,
) -> Launch:
    """This machine's part of a world: its ranks are consecutive, the first machines have one more
    where it does not divide. Raises UsageError.
    """
    if nnodes < 1:
        raise UsageError(f"--nnodes {nnodes} is out of range; it takes 1 or more")
    if machine is None or not 0 <= machine < nnodes:
        said = "is missing" if machine is None else f"{machine} is out of range"
        raise UsageError(f"--node-rank {said}; with --nnodes {nnodes} it takes 0 to {nnodes - 1}")
    if world < nnodes:
        raise UsageError(
            f"--world {world} is smaller than --nnodes {nnodes}: a machine would have no rank"
        )
    if init_method is None:
        if not master_addr:
            raise UsageError(
                "--master-addr is missing; give an address of machine 0 that the others can reach"
            )
        port = _DEFAULT_PORT if master_port is None else master_port
        if not 0 < port < 65536:
            raise UsageError(f"--master-port {port} is out of range; it takes 1 to 65535")
        init_method = f"tcp://{master_addr}:{port}"
    elif not init_method.startswith(("tcp://", "file://")):
        raise UsageError(
            f"--init-method {init_method!r} is not known; it takes tcp://HOST:PORT or file:///PATH"
        )
    each, more = divmod(world, nnodes)
    first = machine * each + min(machine, more)
    ranks = range(first, first + each + (machine < more))
    return Launch(
        launcher=NAME,
        rank=machine,
        world=world,
        ranks_here=tuple(ranks),
        local_rank=0,
        local_world=len(ranks),
        meeting=init_method,
        owned=False,
    )
