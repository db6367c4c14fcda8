"""The guard of production runs: `distcheck.guard(optimizer, every=100)`.

guarding    begins a guard, counts steps, has ranks compare, and acts on a difference
watched     the model: found when it is called; samples, buffers and random streams
state       what one rank holds after a step, as digests
digests     of tensors, on the device that holds them
exchange    the guard's own group of ranks, and who has reached a check if one rank ends early
comparing   what must be alike, and what must not
records     what was found; the bundle; what `distcheck job --guard` reads of each rank
audit       what goes into an exchange and what comes out, as sums with signs
explaining  causes, for `distcheck explain`
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distcheck.job.guard.guarding import Action, Guard

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
) -> "Guard":
    """Compares the ranks' replicas after step 2 and every `every` steps; one line of a script.

        distcheck.guard(optimizer, every=100)

    Compared by digest: parameters, buffers, the optimizer's state and settings. Ranks must have
    trained on different samples and drawn different random numbers.

    optimizer      a torch.optim.Optimizer, or accelerate's or Fabric's around one
    on_difference  "raise" DivergenceError, "warn", or a function that gets what was found
    model          the model, where it is not found by its call in training
    group          the ranks that hold replicas, where not all do (tensor parallelism)
    save           the folder for bundles, for `distcheck explain`; None writes none
    samples        whether ranks must have different samples
    randomness     whether ranks must draw different random numbers in the forward pass
    timeout_s      how long a check waits for the slowest rank
    audit          whether what the optimizer gets is compared with what backward gave, too: it
                   must be one weighted mean over the ranks for all parameters. Not with clipping
                   by value or noise. "bfloat16" or "float16", where the exchange rounds to it

    All ranks must call it, after `init_process_group`, and make the same steps. Raises UsageError.
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
    )
