"""Defines the search space as Hypothesis strategies, which users' property tests can use as well.

Hypothesis shrinks towards the first of several choices. The simplest choice is therefore first:
fewer ranks, one step, float32, one sample per rank, one layer without marks, no delays.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
import xxhash
from hypothesis import strategies as st

from distcheck.backends import name_of
from distcheck.plan import cases as plan
from distcheck.plan.declined import ABSENT, ACCUMULATE
from distcheck.plan.settings import Request
from distcheck.records import Adaptation, Case, Delay
from distcheck.records.case import as_file_name
from distcheck.records.generated_words import (
    EXPLORED_DTYPES,
    GROUPS,
    KINDS,
    MARKS,
    MARKS_OF,
    MOST_ACCUMULATE,
    MOST_NESTED,
    NESTED,
    OPTIMIZERS,
    SAMPLES,
    SCHEDULE,
    GeneratedLayer,
    GeneratedModelSpec,
    is_trainable_layer,
)
from distcheck.training.adapters.options import adaptation_of

MOST_WORLD, MOST_STEPS, MOST_LAYERS = 6, 6, 4
_MOST_SHARD, _MOST_DELAYS, _MOST_MS, _MOST_COLLECTIVES = 4, 2, 40, 5
# Sizes around limits of splitting: fewer elements than ranks, primes, segments of gloo's ring, a
# bucket.
_TABLES = (1, 2, 3, 5, 17, 1003, 70_001, 300_007)
_SIZES: Mapping[str, Sequence[int]] = {
    "linear": range(1, 8),
    "conv": range(1, 5),
    "table": _TABLES,
}
LATE, UNEQUAL, SHORT = "late", "unequal", "short-last-batch"
TURNS = "turns"  # schedules of a simulated world; `schedule` is a word of models
# That many schedules take up to two seconds; half of the cases of a simulated world have none.
_SCHEDULES = (0, 0, 8, 24)
# Values of `--without`.
DIMENSIONS = (
    *KINDS, *MARKS, NESTED, *OPTIMIZERS, GROUPS, SCHEDULE, *EXPLORED_DTYPES, LATE, UNEQUAL, SHORT,
    ACCUMULATE, TURNS,
)  # fmt: skip
# One bit for each mark; the rest is the nesting depth of a layer.
_BITS = st.integers(0, 2 ** len(MARKS) * (MOST_NESTED + 1) - 1)
_MORE = (False, True, True)
_UNCOMMON = (False,) * 3 + (True,)
_RARE = (False,) * 7 + (True,)


@st.composite
def layers(draw: st.DrawFn, *, without: Collection[str] = ()) -> GeneratedLayer:
    """Draw one layer of a generated model, without the kinds and marks in `without`.

    All kinds of layers draw the same small number of choices. Hypothesis can therefore replace one
    kind by another and leave everything else unchanged, and can remove a layer by deleting five
    consecutive choices.
    """
    kind = draw(st.sampled_from([kind for kind in KINDS if kind not in without]))
    place = draw(st.integers(0, len(_TABLES) - 1))
    chosen = draw(_BITS) & draw(_BITS)  # a quarter of the bits
    nested = 0 if NESTED in without else chosen >> len(MARKS)
    sizes = _SIZES.get(kind, (0,))
    marks = [mark for bit, mark in enumerate(MARKS) if chosen >> bit & 1 and mark not in without]
    kept = tuple(mark for mark in marks if mark in MARKS_OF[kind])
    return GeneratedLayer(kind, sizes[place % len(sizes)], kept, nested)


@st.composite
def models(
    draw: st.DrawFn,
    *,
    most_layers: int = MOST_LAYERS,
    samples: int = SAMPLES,
    accumulate: int = 1,
    without: Collection[str] = (),
) -> GeneratedModelSpec:
    """Draw a model for training on `samples` samples with `accumulate` backward passes per step.
    Its attribute `workload` is the name from which `distcheck.workloads.generated` builds the
    module.
    """
    drawn = [draw(layers(without=without))]
    while draw(st.sampled_from(_MORE)) and len(drawn) < most_layers:  # drawn after the last, too
        drawn.append(draw(layers(without=without)))
    norms = [layer for layer in drawn if layer.kind == "norm"][:1]
    convs = [layer for layer in drawn if layer.kind == "conv"][:3]
    ordered = norms + convs + [layer for layer in drawn if layer.kind not in ("norm", "conv")]
    if not any(is_trainable_layer(layer) for layer in ordered):
        ordered = [_remove_mark(layer, "frozen") for layer in ordered]
    if not any(is_trainable_layer(layer) for layer in ordered):
        ordered.append(GeneratedLayer("linear", 1))  # possible after any layer
    optimizer = draw(st.sampled_from([name for name in OPTIMIZERS if name not in without]))
    groups = draw(st.sampled_from(_UNCOMMON)) and GROUPS not in without
    schedule = draw(st.sampled_from(_UNCOMMON)) and SCHEDULE not in without
    absent = draw(st.sampled_from(_UNCOMMON)) and not {ABSENT, "sgd"} & {*without}
    if absent:
        ordered = _make_one_layer_absent(ordered)
    if not absent or not any(ABSENT in layer.marks for layer in ordered):
        ordered = [_remove_mark(layer, ABSENT) for layer in ordered]
        groups = groups and _count_parameters(ordered) > 1
        return GeneratedModelSpec(tuple(ordered), optimizer, samples, accumulate, groups, schedule)
    # If no rank has a gradient, a zero gradient is correct only if it does not move the parameter.
    # Momentum and weight decay would, and no strategy can detect that without asking the other
    # ranks.
    return GeneratedModelSpec(tuple(ordered), "sgd", samples, accumulate, False, schedule)


def _make_one_layer_absent(ordered: Sequence[GeneratedLayer]) -> list[GeneratedLayer]:
    """Return the layers with at least one trained layer marked as absent, if another layer is
    trained by all samples. (Without any trained parameter, the loss has no backward pass.)
    """
    found = list(ordered)
    trained = [n for n, layer in enumerate(found) if is_trainable_layer(layer)]
    taking = [n for n in trained if ABSENT in MARKS_OF[found[n].kind]]
    if taking and not any(ABSENT in found[n].marks for n in taking):
        marks = (*found[taking[0]].marks, ABSENT)
        found[taking[0]] = msgspec.structs.replace(found[taking[0]], marks=marks)
    if all(ABSENT in found[n].marks for n in trained):
        found[trained[-1]] = _remove_mark(found[trained[-1]], ABSENT)
    return found


def _remove_mark(layer: GeneratedLayer, mark: str) -> GeneratedLayer:
    return msgspec.structs.replace(layer, marks=tuple(m for m in layer.marks if m != mark))


def _count_parameters(layers: Sequence[GeneratedLayer]) -> int:
    two = sum(layer.kind == "norm" or "bias" in layer.marks for layer in layers)
    return two + sum(layer.kind != "running" for layer in layers)


@st.composite
def delays(draw: st.DrawFn, world: int) -> tuple[Delay, ...]:
    """Draw delays of at most two ranks; usually none."""
    if world < 2 or not draw(st.sampled_from(_RARE)):
        return ()
    one = st.builds(
        Delay,
        rank=st.integers(0, world - 1),
        collective=st.integers(0, _MOST_COLLECTIVES),
        ms=st.integers(1, _MOST_MS),
    )
    return tuple(draw(st.lists(one, min_size=1, max_size=_MOST_DELAYS)))


@st.composite
def cases(
    draw: st.DrawFn,
    strategy: str,
    *,
    most_world: int = MOST_WORLD,
    most_steps: int = MOST_STEPS,
    adaptation: Adaptation | None = None,
    arguments: Mapping[str, Any] | None = None,
    vary: Mapping[str, Sequence[str]] | None = None,
    without: Collection[str] = (),
    loss: str = "mean",
    deadline_s: float = 3.0,
    backend: str = "gloo",
) -> Case:
    """Draw a case for `strategy`: world size, steps, dtype, shards, backward passes per step,
    model, arguments and delays. With a simulated `backend`, draw also the number of schedules to
    compare.

    `vary` maps names of strategy arguments to possible values as Python literals, the simplest
    value first. `arguments` are the same in every case. `without` lists dimensions to exclude (see
    `DIMENSIONS`). Excluding "accumulate" saves time if the strategy runs backward itself or
    declines the cell `accumulation`. `distcheck.addons.explore.verify_case` runs a case.
    """
    adaptation = adaptation or adaptation_of(arguments=arguments or {})
    several = tuple(range(2, most_world + 1))
    world = draw(st.sampled_from((1, *several, *several, *several)))
    steps = draw(st.integers(1, most_steps))
    dtype = draw(st.sampled_from([name for name in EXPLORED_DTYPES if name not in without]))
    extra = 0 if UNEQUAL in without else draw(st.integers(0, world - 1))
    shard = draw(st.integers(1, _MOST_SHARD))  # of the rank with the smallest shard
    batch = world * shard + extra
    # Both are drawn even if there is no room for them, so that later choices shrink independently.
    several_passes = ACCUMULATE not in without and draw(st.sampled_from(_UNCOMMON))
    short = SHORT not in without and draw(st.sampled_from(_UNCOMMON))
    # In a low-precision dtype, more passes round by as much as a rank's weight: nothing could be
    # detected.
    most_passes = 2 if dtype == "bfloat16" else MOST_ACCUMULATE
    passes = draw(st.integers(2, min(shard, most_passes))) if several_passes and shard > 1 else 1
    samples = SAMPLES
    if short and steps > 1:
        # Each shard of it has at least as many samples as a step has passes: code that synchronizes
        # in each of them must find all ranks there.
        shards = st.integers(passes, shard).map(lambda each: each * world)
        last = shards if UNEQUAL in without else st.integers(passes * world, batch)
        samples = batch + draw(last)
    model = draw(models(samples=samples, accumulate=passes, without=without))
    if vary:
        chosen = tuple((name, draw(st.sampled_from(list(vary[name])))) for name in sorted(vary))
        adaptation = msgspec.structs.replace(adaptation, arguments=(*adaptation.arguments, *chosen))
    late = () if LATE in without else draw(delays(world))
    simulated = name_of(backend) == "simulated"
    schedules = draw(st.sampled_from(_SCHEDULES)) if simulated and TURNS not in without else 0
    template = _template(strategy, dtype, adaptation, loss, deadline_s, backend)
    case = msgspec.structs.replace(
        template,
        id="",
        world=world,
        steps=steps,
        batch=batch,
        workload=model.workload,
        rerun=bool(late) and not schedules,  # their default schedule runs twice
        delays=late,
        schedules=schedules if world > 1 else 0,
    )
    return msgspec.structs.replace(case, id=case_name(case))


_templates: dict[Any, Case] = {}


def _template(
    strategy: str, dtype: str, adaptation: Adaptation, loss: str, deadline_s: float, backend: str
) -> Case:
    """Return the case that `verify` would plan. The result is cached, because querying entry points
    is slow.
    """
    key = (strategy, dtype, adaptation, loss, deadline_s, backend)
    if key not in _templates:
        request = Request(
            strategies=(strategy,),
            workloads=("generated:linear1",),
            dtype=dtype,
            adaptation=adaptation,
            loss=loss,
            deadline_s=deadline_s,
            backend=backend,
            separate=False,
        )
        (_templates[key],) = plan.plan_cases(request)
    return _templates[key]


def case_name(case: Case) -> str:
    """Return a name for a case that depends only on the contents of the case."""
    blank = msgspec.structs.replace(case, id="", deadline_s=0.0)
    name = as_file_name(case.strategy.rpartition("/")[2].replace(".py:", "-"))
    return f"{name}-w{case.world}-{xxhash.xxh3_64_hexdigest(msgspec.json.encode(blank))}"
