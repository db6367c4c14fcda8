"""The guard of production runs: `distcheck.guard(optimizer, every=100)`.

guarding    starts a guard, counts steps, makes the ranks compare, and acts on a difference
watched     the model (found when it is called), samples, buffers and RNG streams
state       the state of one rank after a step, as digests
digests     digests of tensors, on the tensor's device
exchange    the guard's process group, and the arrival of each rank if one exits early
comparing   state that must be the same across ranks, and state that must differ
records     findings, the bundle, and the data that `distcheck job --guard` reads per rank
audit       gradients before and after synchronization, as random ±1 projections
explaining  causes, for `distcheck explain`
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distcheck.job.guard.guarding import Action, Guard, OnCheck

__all__ = ["guard"]


def guard(
    optimizer: Any,
    *,
    every: int = 100,
    on_difference: "Action" = "raise",
    model: Any = None,
    group: Any = None,
    save: str | None = ".distcheck/guard",
    samples: bool = True,
    randomness: bool = True,
    timeout_s: float = 1800.0,
    audit: bool | str = False,
    on_check: "OnCheck | None" = None,
) -> "Guard":
    """Compare the ranks' replicas after step 2 and every `every` steps, by one line in a script.

        distcheck.guard(optimizer, every=100)

    Digests of parameters, buffers, optimizer state and settings must be the same on all ranks.
    Samples and random numbers must differ across ranks.

        optimizer      a torch.optim.Optimizer, or the wrapper of accelerate or Fabric
        on_difference  "raise" DivergenceError, "warn", or a function that receives the finding
        model          the model, if it cannot be found from its calls in training
        group          the ranks that hold replicas, if not all do (tensor parallelism)
        save           the folder for bundles, for `distcheck explain`; None writes none
        samples        if True, ranks must have different samples
        randomness     if True, ranks must draw different random numbers in the forward pass
        timeout_s      seconds that a check waits for the slowest rank
        audit          if True, also check that optimizer gradients are one weighted mean of the
                       local gradients, for all parameters. Not supported with clipping by value
                       or noise. "bfloat16" or "float16" if the all-reduce rounds to that dtype
        on_check       a function that is called after each check, on the first rank, with a dict
                       for a logger: step, agrees (bool), checks, tensors (compared), causes, text,
                       file (the bundle)

    All ranks must call it after `init_process_group` and make the same steps. Raises UsageError.
    """
    from distcheck.job.guard.guarding import start

    return start(
        optimizer,
        every=every,
        action=on_difference,
        model=model,
        group=group,
        save=save,
        samples=samples,
        randomness=randomness,
        timeout_s=timeout_s,
        audit=audit,
        on_check=on_check,
    )
