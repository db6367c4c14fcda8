"""What can be heard of a training script, by the places of `hooks`."""

from collections.abc import Callable

_EVENTS = frozenset((
    "begins", "iterates", "samples_from", "fetches", "fetched", "batch", "is_over", "length",
    "enters", "leaves", "evaluates", "reaches", "gradient", "target", "losses", "backward",
    "backward_over", "gradients_ready", "clipped", "scales", "unscales", "scaler_step",
    "scaler_stepped", "autocasts", "makes", "steps", "stepped", "collective",
))  # fmt: skip


class Deaf:
    """Hears nothing of a training script: it ignores the events that a listener does not care for.
    A listener may put other data into the tensors that it hears of.

    begins(loader), iterates(loader, iterator)  a pass over a data loader is about to begin; begins
    samples_from(iterator)                      it has got its sampler's iterator
    fetches(), fetched()                        this process reads samples of a batch; has read them
    batch(iterator, batch)                      a data loader hands out a batch
    is_over(iterator)                           returns True if it is to hand out nothing more
    length(loader)                              returns how many batches it is to have, or None
    enters(model, args, kwargs)                 the outermost model is called, in training
    leaves(model, result)                       that call is over
    evaluates(model, args, kwargs)              the outermost model is called, and not in training
    reaches(place)                              backward goes through what a forward pass returned
    gradient(name, gradient)                    a gradient is about to be added to a parameter's
    target(computed, target)                    a loss of torch's is called with a target
    losses(name, reduction, target, ignored, value)  it has returned
    backward(loss), backward_over()             a backward pass begins; is over
    gradients_ready()                           clipping, unscaling or a step follows
    clipped(kind, most, norm, parameters)       gradients were clipped
    scales(scaler), unscales(optimizer)         a GradScaler scales a loss; divides gradients again
    scaler_step(scaler, optimizer)              a GradScaler is asked for a step
    scaler_stepped(scaler, optimizer)           it has made the step, or has skipped it
    autocasts(context)                          autocast begins, or ends for a while
    makes(optimizer)                            an optimizer gets parameters
    steps(optimizer)                            it is about to step, or has just called its closure
    stepped(optimizer)                          it has stepped
    collective(name, place, given)              Python code calls a collective
    """

    def __getattr__(self, event: str) -> Callable[..., None]:
        if event not in _EVENTS:
            raise AttributeError(event)
        return _ignore


def _ignore(*given: object) -> None:
    """Does nothing of an event."""
