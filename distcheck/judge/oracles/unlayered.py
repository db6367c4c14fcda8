"""Expectations without a layer: the initial model, and the workload's own events at each step."""

from collections.abc import Set

import torch
from torch import nn

from distcheck.judge.oracles.forms import Agreement, Gradients, IndependentStep, InitialState
from distcheck.judge.oracles.references import AtStep
from distcheck.recordings.recording import Kind
from distcheck.records import expected_events as events
from distcheck.training.building import names_sharing_storage, recorded_parameters


def initial_state(at: AtStep) -> InitialState | None:
    """Return a model built from the same seed; only step 0 has an initial state."""
    if at.step != 0:
        return None
    model = at.ingredients.model()
    return InitialState(
        parameters=tuple(parameter.detach() for _, parameter in recorded_parameters(model)),
        buffers=tuple(model.buffers()),
    )


def agreement(at: AtStep) -> Agreement | None:
    """Return the groups of ranks that must agree; None if all must, in gradients and state too."""
    design = at.references.parameter_design
    if design is None:
        return None
    groups = tuple(design.agreeing(at.step, index) for index in range(len(at.specs)))
    return Agreement(groups, design.remark())


def purpose(at: AtStep) -> IndependentStep:
    declared = {type(event) for event in at.ingredients.must_happen}
    of_model = declared & {
        events.ParameterFrozen, events.ParameterUnfrozen, events.StepInEvalMode,
        events.TiedParameter, events.SharedStorage, events.ModuleClasses,
    }  # fmt: skip
    model = (
        _prepared_model(at) if of_model or events.LearningRateChanged in declared else nn.Module()
    )
    return IndependentStep(
        own=own_gradients(at),
        trains={name: parameter.requires_grad for name, parameter in recorded_parameters(model)},
        training_mode=all(module.training for module in model.modules()),
        calls=_calls(at) if events.ModelCalledTwice in declared and at.step == 0 else 0,
        rates=_rates(at, model) if events.LearningRateChanged in declared else (),
        starts_alike=events.InitialParametersDiffer not in declared
        or at.step != 0
        or _has_equal_initial_models(at),
        twice_named=_twice_named(model),
        in_one_storage=names_sharing_storage(model),
        kinds={type(module).__name__ for module in model.modules()}
        | {type(parameter).__name__ for parameter in model.parameters()},
    )


def own_gradients(at: AtStep) -> tuple[Gradients, ...]:
    """Return local gradients [parameter][rank]: recorded, or recomputed if any is missing."""
    found: list[Gradients] = []
    ranks = range(at.trace.layout.world)
    for index in range(len(at.specs)):
        seen = tuple(at.trace.tensor(r, Kind.LOCAL_GRADIENT, at.step, index) for r in ranks)
        is_seen = all(gradient is not None for gradient in seen)
        found.append(seen if is_seen else tuple(own[index] for own in at.shard_gradients))
    return tuple(found)


def _prepared_model(at: AtStep) -> nn.Module:
    model = at.ingredients.model()
    for step in range(at.step + 1):
        at.ingredients.prepare(model, step)
    return model


def _calls(at: AtStep) -> int:
    """Return the number of model calls in rank 0's forward pass."""
    model, calls = at.ingredients.model(), 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    ids = torch.tensor(at.shares.headers[0].ids, dtype=torch.int64)
    model.register_forward_hook(count)
    at.ingredients.prepare(model, at.step)
    at.ingredients.loaded.workload.loss(model, at.ingredients.batch(ids, len(ids)))
    return calls


def _rates(at: AtStep, model: nn.Module) -> tuple[float | None, ...]:
    optimizer = at.ingredients.optimizer(model.parameters())
    at.ingredients.schedule(optimizer, at.step)
    return tuple(group.get("lr") for group in getattr(optimizer, "param_groups", ()))


def _has_equal_initial_models(at: AtStep) -> bool:
    """Return True if the workload's initialization gives all ranks equal models."""
    models = [at.ingredients.model() for _ in range(at.trace.layout.world)]
    for rank, model in enumerate(models):
        at.ingredients.apply_initial_changes(model, rank)
    flat = [torch.cat([p.detach().flatten() for p in model.parameters()]) for model in models]
    return all(torch.equal(flat[0], other) for other in flat[1:])


def _twice_named(model: nn.Module) -> Set[str]:
    every = list(model.named_parameters(remove_duplicate=False))
    first = {id(parameter): name for name, parameter in reversed(every)}
    return {first[id(p)] for name, p in every if name != first[id(p)]}
