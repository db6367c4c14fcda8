"""What a run had in it, and so what its pass does not show. No torch.

A pass says nothing of what no case had: a tensor that is larger, a step that comes later, a second
parameter group. That is read off the cases themselves, so the sentence is as long as it must be.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from distcheck.backends import name_of
from distcheck.records import Case, CheckResult, Contents
from distcheck.records import expected_events as happenings
from distcheck.records.expected_events import PURPOSE, Happening
from distcheck.records.mistakes import range_of
from distcheck.training.epoch_positions import shard_sizes
from distcheck.training.jobs import TRAITS, CaseFacts
from distcheck.worlds.surroundings import TOGETHER, Surroundings

_MOST_KINDS = 12

# What a case may have, and how a report names it.
_FEATURES: Mapping[str, str] = {
    "groups": "several parameter groups",
    "schedule": "a learning-rate schedule",
    "alike": "two parameters of one shape",
    "tied": "tied parameters",
    "tied_or_unused": "absent gradients",
    "sparse": "sparse gradients",
    "not_contiguous": "another memory order",
    "views": "views of one storage",
    "absent_on_some": "gradients absent on some ranks",
    "zero_on_some": "gradients zero on some ranks only",
    "non_finite": "infinite or NaN gradients",
    "frozen": "frozen parameters",
    "unfrozen": "parameters that train later",
    "several_dtypes": "several dtypes",
    "complex": "complex parameters",
    "buffers": "buffers",
    "integer_buffers": "buffers of integers",
    "batch_norm": "BatchNorm",
    "eval_mode": "eval mode",
    "random_numbers": "random numbers in the forward pass",
    "unequal_shards": "unequal shards",
    "accumulation": "accumulation",
    "clipping": "clipping",
    "loss_scaling": "loss scaling",
    "resume": "a resumed run",
    "keeps_gradients": "zero_grad(set_to_none=False)",
    "evaluates": "evaluation between steps",
    "starts_apart": "ranks that begin apart",
    "late_ranks": "ranks that are slowed down",
    "process_state": "ranks that differ in hash seed, addresses, environment or LOCAL_RANK",
}

# Features that a case has if its workload declares an event, and it was seen to happen.
_EVENTS: Mapping[str, type[Happening]] = {
    "non_finite": happenings.NotFinite,
    "unfrozen": happenings.Unfrozen,
    "eval_mode": happenings.EvalMode,
    "starts_apart": happenings.StartsApart,
}


# What no workload has, whatever its features are.
_IN_NO_CASE = ("parameter names; the time",)


def contents_of(
    case: Case,
    facts: CaseFacts,
    results: Sequence[CheckResult],
    *,
    surroundings: Surroundings = TOGETHER,
) -> Contents:
    """What a case that was run had in it; `surroundings` are its rerun's."""
    model, training = facts.model, facts.training
    with_data = len(case.with_data)
    sizes = shard_sizes(case.steps, size=facts.train_size, batch=case.batch, world=with_data)
    gradients = [one for r in results if r.check == "gradients" for one in r.shown.values()]
    shapes = [spec.shape for spec in model.parameters]
    elements = [spec.elements for spec in model.parameters]
    purpose = any(r.check == PURPOSE and r.verdict == "pass" for r in results)
    happened = {type(event) for event in facts.must_happen} if purpose else set()
    present = {
        "groups": facts.groups > 1,
        "schedule": facts.schedule,
        "alike": len(set(shapes)) < len(shapes),
        "tied_or_unused": any(one.absent for one in gradients),
        "absent_on_some": any(one.absent_on_some for one in gradients),
        "zero_on_some": any(one.zero_on_some for one in gradients),
        "frozen": facts.frozen > 0,
        **{name: name in facts.traits for name in TRAITS},
        "several_dtypes": len({spec.dtype for spec in model.parameters}) > 1,
        "complex": any("complex" in spec.dtype for spec in model.parameters),
        "buffers": bool(model.buffers),
        "integer_buffers": any("int" in spec.dtype for spec in model.buffers),
        "batch_norm": facts.normalizes_batches,
        "random_numbers": facts.draws_random_numbers,
        "unequal_shards": any(len(set(step)) > 1 for step in sizes),
        "accumulation": training.accumulate > 1 or facts.contract.micro_batches > 1,
        "clipping": training.clip_norm is not None,
        "loss_scaling": training.loss_scale is not None,
        "resume": training.resume_before is not None,
        "keeps_gradients": training.keeps_gradients,
        "evaluates": training.evaluates,
        "late_ranks": bool(case.delays) or "delays" in surroundings.factors,
        "process_state": "interpreters" in surroundings.factors,
    }
    present |= {name: event in happened for name, event in _EVENTS.items()}
    return Contents(
        world=case.world,
        backend=case.backend,
        device=case.device,
        dtype=case.dtype,
        steps=case.steps,
        worlds=2 if case.rerun else 1,
        tensors=len(elements),
        batch=case.batch,
        elements=sum(elements),
        sizes=range_of([size for one in gradients for size in one.sizes]),
        most_elements=max(elements, default=0),
        most_dimensions=max(map(len, shapes), default=0),
        depth=max((spec.name.count(".") for spec in model.parameters), default=0),
        kinds=facts.kinds,
        features=tuple(name for name in _FEATURES if present[name]),
        uses=facts.uses,
    )


def of_document(cases: Sequence[Mapping[str, Any]]) -> list[Contents]:
    """What the cases of a JSON report had in them, as far as it says so."""
    found = [case["contents"] for case in cases if case.get("contents")]
    return [msgspec.convert(contents, Contents) for contents in found]


def not_shown(cases: Sequence[Contents]) -> tuple[str, ...]:
    """What a pass of these cases shows nothing about; nothing where there is no case."""
    return tuple(_not_shown(cases)) if cases else ()


def _not_shown(cases: Sequence[Contents]) -> Iterator[str]:
    yield f"worlds other than {', '.join(map(str, sorted({case.world for case in cases})))}"
    batches = ", ".join(map(str, sorted({case.batch for case in cases if case.batch})))
    yield f"batches other than {batches}" if batches else "batches of other sizes"
    yield (
        f"models of more than {max(case.tensors for case in cases)} tensors or "
        f"{max(case.elements for case in cases):,} elements, tensors of more than "
        f"{max(case.most_elements for case in cases):,} elements or "
        f"{max(case.most_dimensions for case in cases)} dimensions, modules nested deeper than "
        f"{max(case.depth for case in cases)}"
    )
    together = max(case.elements * _bytes_of(case.dtype) for case in cases) / (1 << 20)
    yield (
        f"a second bucket where one takes {together:.2g} MiB or more, which is what all gradients "
        "have together"
    )
    kinds = sorted({kind for case in cases for kind in case.kinds})
    named = ", ".join(kinds[:_MOST_KINDS])
    more = f" and {len(kinds) - _MOST_KINDS} more" if len(kinds) > _MOST_KINDS else ""
    yield f"kinds of module other than {named}{more}"
    least, most = range_of([case.steps for case in cases])
    more = f" ({most:.0f} in some cases)" if least < most else ""
    yield f"what begins after step {least:.0f}{more}, or after the last step"
    if sizes := range_of([size for case in cases for size in case.sizes]):
        least, most = sizes
        yield f"gradients outside {least:.2g} to {most:.2g}"
    else:
        yield "huge or denormal gradients"
    there = {feature for case in cases for feature in case.features}
    yield from (said for name, said in _FEATURES.items() if name not in there)
    yield from _IN_NO_CASE
    yield f"dtypes other than {', '.join(sorted({case.dtype for case in cases}))}"
    worlds = "two worlds" if max(case.worlds for case in cases) == 2 else "one world"
    simulated = any(name_of(case.backend) == "simulated" for case in cases)
    yield f"orders of arrival other than those of {worlds}{_of_schedules(cases, simulated)}"
    if simulated:
        yield (
            "ranks in processes of their own, and a real transport (ranks of backend simulated are "
            "threads of one process: they share C code, and what packages change in place)"
        )
    backends = ", ".join(sorted({f"{case.backend} on {case.device}" for case in cases}))
    yield f"backends other than {backends}, and other hardware"


def _bytes_of(dtype: str) -> int:
    """How many an element has: 4 of "float32"."""
    digits = "".join(filter(str.isdigit, dtype))
    return int(digits) // 8 if digits else 0


def _of_schedules(cases: Sequence[Contents], simulated: bool) -> str:
    counts = [case.schedules for case in cases if case.schedules]
    if not counts:
        which = (
            ": which message a receive from any rank takes, for instance (--schedules tries others)"
        )
        return which if simulated else ""
    of = "one case" if len(counts) == 1 else f"each of {len(counts)} cases"
    return f", and of {min(counts)} schedules of {of}"
