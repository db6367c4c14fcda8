"""Determines the features that the cases of a run covered, and therefore the limits of its pass.
Does not import torch.

A pass shows nothing about features that no case had: a larger tensor, a later step, a second param
group. These limits are derived from the cases. The most important limits are features that the
strategy's code uses: they are warnings, with the options that exercise them. They are hints from
the source (`training/adapters/uses.py`) and fail nothing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from distcheck.backends import name_of
from distcheck.judge.diagnosis.communication import warn_of_ledger
from distcheck.recordings.traces.layout import BYTES
from distcheck.records import Case, CaseContents, CaseReport, CheckResult, Diagnosis
from distcheck.records import expected_events as happenings
from distcheck.records.causes import name_cause
from distcheck.records.expected_events import PURPOSE, Happening
from distcheck.records.mistakes import range_of_sizes
from distcheck.records.run_facts import UsedFeature
from distcheck.training.epoch_positions import shard_sizes
from distcheck.training.jobs import TRAITS, CaseFacts
from distcheck.worlds.surroundings import TOGETHER, Surroundings

_MOST_KINDS = 12

# Features of a case, by their name in a report.
_FEATURES: Mapping[str, str] = {
    "groups": "several parameter groups",
    "schedule": "a learning-rate schedule",
    "alike": "two parameters of one shape",
    "tied": "tied parameters",
    "tied_or_unused": "absent gradients",
    "sparse": "sparse gradients",
    "not_contiguous": "a different memory layout",
    "views": "views that share one storage",
    "absent_on_some": "gradients absent on some ranks",
    "zero_on_some": "gradients zero on some ranks only",
    "non_finite": "infinite or NaN gradients",
    "frozen": "frozen parameters",
    "unfrozen": "parameters unfrozen later",
    "several_dtypes": "several dtypes",
    "complex": "complex parameters",
    "buffers": "buffers",
    "integer_buffers": "integer buffers",
    "batch_norm": "BatchNorm",
    "eval_mode": "eval mode",
    "random_numbers": "random numbers in the forward pass",
    "unequal_shards": "uneven shards",
    "accumulation": "accumulation",
    "clipping": "clipping",
    "loss_scaling": "loss scaling",
    "resume": "a resumed run",
    "keeps_gradients": "zero_grad(set_to_none=False)",
    "evaluates": "evaluation between steps",
    "starts_apart": "ranks that start with different parameters",
    "late_ranks": "delayed ranks (stragglers)",
    "process_state": "ranks that differ in hash seed, addresses, environment or LOCAL_RANK",
}

# Features that a case has if its workload declares an event, and it happened.
_EVENTS: Mapping[str, type[Happening]] = {
    "non_finite": happenings.NonfiniteGradient,
    "unfrozen": happenings.ParameterUnfrozen,
    "eval_mode": happenings.StepInEvalMode,
    "starts_apart": happenings.InitialParametersDiffer,
}


# Properties that no workload has, whatever its features.
_IN_NO_CASE = ("parameter names; the time",)


def contents_of(
    case: Case,
    facts: CaseFacts,
    results: Sequence[CheckResult],
    *,
    surroundings: Surroundings = TOGETHER,
) -> CaseContents:
    """Return the features of a case that ran; `surroundings` are those of its rerun."""
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
    return CaseContents(
        worlds=2 if case.rerun else 1,
        tensors=len(elements),
        elements=sum(elements),
        sizes=range_of_sizes([size for one in gradients for size in one.sizes]),
        most_elements=max(elements, default=0),
        most_dimensions=max(map(len, shapes), default=0),
        depth=max((spec.name.count(".") for spec in model.parameters), default=0),
        kinds=facts.kinds,
        features=tuple(name for name in _FEATURES if present[name]),
        uses=facts.uses,
    )


Ran = tuple[Case, CaseContents]


def _that_ran(reports: Sequence[CaseReport]) -> list[Ran]:
    return [(report.case, report.contents) for report in reports if report.contents is not None]


def not_shown(reports: Sequence[CaseReport]) -> tuple[str, ...]:
    """Return the properties that a pass of these cases does not cover; empty without cases."""
    ran = _that_ran(reports)
    return tuple(_not_shown(ran)) if ran else ()


def _not_shown(ran: Sequence[Ran]) -> Iterator[str]:
    yield f"world sizes other than {', '.join(map(str, sorted({case.world for case, one in ran})))}"
    batches = ", ".join(map(str, sorted({case.batch for case, one in ran})))
    yield f"global batch sizes other than {batches}"
    yield (
        f"models with more than {max(one.tensors for case, one in ran)} tensors or "
        f"{max(one.elements for case, one in ran):,} elements, tensors with more than "
        f"{max(one.most_elements for case, one in ran):,} elements or "
        f"{max(one.most_dimensions for case, one in ran)} dimensions, modules nested deeper than "
        f"{max(one.depth for case, one in ran)}"
    )
    together = max(one.elements * BYTES.get(case.dtype, 0) for case, one in ran) / (1 << 20)
    yield (f"a second bucket of {together:.2g} MiB or more, the size of all gradients together")
    kinds = sorted({kind for case, one in ran for kind in one.kinds})
    named = ", ".join(kinds[:_MOST_KINDS])
    more = f" and {len(kinds) - _MOST_KINDS} more" if len(kinds) > _MOST_KINDS else ""
    yield f"module types other than {named}{more}"
    least, most = range_of_sizes([case.steps for case, one in ran])
    more = f" ({most:.0f} in some cases)" if least < most else ""
    yield f"bugs that first appear after step {least:.0f}{more}, or after the last step"
    if sizes := range_of_sizes([size for case, one in ran for size in one.sizes]):
        least, most = sizes
        yield f"gradient magnitudes outside {least:.2g} to {most:.2g}"
    else:
        yield "huge or denormal gradients"
    there = {feature for case, one in ran for feature in one.features}
    yield from (said for name, said in _FEATURES.items() if name not in there)
    yield from _IN_NO_CASE
    yield f"dtypes other than {', '.join(sorted({case.dtype for case, one in ran}))}"
    worlds = "two worlds" if max(one.worlds for case, one in ran) == 2 else "one world"
    simulated = any(name_of(case.backend) == "simulated" for case, one in ran)
    yield f"interleavings other than those of {worlds}{_of_schedules(ran, simulated)}"
    if simulated:
        yield (
            "ranks in separate processes, and a real transport (ranks of backend simulated are "
            "threads of one process, so they share C code and all module state)"
        )
    backends = ", ".join(sorted({f"{case.backend} on {case.device}" for case, one in ran}))
    yield f"backends other than {backends}, and other hardware"


def _of_schedules(ran: Sequence[Ran], simulated: bool) -> str:
    counts = [one.schedules for _, one in ran if one.schedules]
    if not counts:
        which = (
            ", for example which message a receive from any rank takes (--schedules tries others)"
        )
        return which if simulated else ""
    of = "one case" if len(counts) == 1 else f"each of {len(counts)} cases"
    return f", and of {min(counts)} schedules of {of}"


# By feature: the uncovered property, and the option that covers it. Features in
# `_FEATURES` are exercised if a case has them, the others as in `_EXERCISED`.
_GAPS: Mapping[str, tuple[str, str]] = {
    "late": ("bugs that first appear at step {number}", "--workload twelve_steps --steps {after}"),
    "size": ("tensors or buckets of {number:,} elements or bytes", "--workload over_25_mib"),
    "narrow": (
        "more elements or rows than such an integer can count",
        "--workload over_2_24_elements",
    ),
    "world": ("other world sizes", "--world 2 --world 3 --world 5"),
    "non_finite": ("infinite or NaN gradients", "--workload non_finite"),
    "huge": ("gradients of 1e30", "--workload huge_gradients"),
    "denormal": ("denormal gradients", "--workload denormal_gradients"),
    "several_dtypes": ("several dtypes", "--workload mixed_dtypes"),
    "default_dtype": (
        "gradients in a dtype other than torch's default (model.double())",
        "--workload mixed_dtypes",
    ),
    "complex": ("complex parameters", "--workload complex"),
    "accumulation": ("accumulation", "--workload accumulation"),
    "clipping": ("clipping", "--workload clipping"),
    "loss_scaling": ("loss scaling", "--workload loss_scaling"),
    "frozen": ("frozen parameters", "--workload frozen_later"),
    "unfrozen": ("parameters unfrozen later", "--workload unfrozen_later"),
    "sparse": ("sparse gradients", "--workload sparse"),
    "starts_apart": ("ranks that start with different parameters", "--workload different_starts"),
    "resume": ("a resumed run", "--workload resume"),
    "eval_mode": ("eval mode", "--workload evaluation"),
    "buffers": ("buffers", "--workload reassigned_buffers"),
    "tied": ("tied parameters", "--workload tied_weights"),
    "not_contiguous": ("a different memory layout", "--workload transposed"),
    "views": ("views that share one storage", "--workload one_storage"),
    "schedule": ("a learning-rate schedule", "--workload schedule"),
    "draws": ("other RNG seeds", "--workload dropout --seed 1"),
    "closure": ("a step with a closure, which no case uses", ""),
    "async": ("other interleavings", "--backend simulated --schedules 20"),
}
_ORDER = tuple(_GAPS)
_EXERCISED: Mapping[str, Callable[[UsedFeature, Sequence[Ran]], bool]] = {
    "late": lambda use, ran: use.number < max(case.steps for case, one in ran),
    "size": lambda use, ran: use.number < max(one.most_elements for case, one in ran),
    "world": lambda use, ran: len({case.world for case, one in ran}) > 2,
    "huge": lambda use, ran: max((s for case, one in ran for s in one.sizes), default=0) > 1e29,
    "denormal": lambda use, ran: min((s for _, one in ran for s in one.sizes), default=1) < 1e-38,
    "draws": lambda use, ran: False,
    "narrow": lambda use, ran: max(one.most_elements for case, one in ran) > 1 << 24,
    "default_dtype": lambda use, ran: any("several_dtypes" in one.features for case, one in ran),
    "closure": lambda use, ran: False,
    "async": lambda use, ran: any(one.schedules for case, one in ran),
}


def with_remarks(reports: Sequence[CaseReport]) -> list[CaseReport]:
    """Return the reports. The first report of each passing strategy gets a warning for each gap,
    and the first with suspicious collectives those of its ledger.
    """
    found = list(reports)
    for strategy in dict.fromkeys(report.case.strategy for report in reports):
        own = [n for n, report in enumerate(reports) if report.case.strategy == strategy]
        warned = (n for n in own if [*warn_of_ledger(reports[n].ledger)])
        if (n := next(warned, None)) is not None and not reports[n].case.accept:
            remarks = (*found[n].remarks, *warn_of_ledger(found[n].ledger))
            found[n] = msgspec.structs.replace(found[n], remarks=remarks)
        ran = _that_ran([reports[n] for n in own])
        if ran and all(reports[n].verdict == "pass" for n in own):
            first = found[own[0]]
            remarks = (*first.remarks, *remarks_on(ran))
            found[own[0]] = msgspec.structs.replace(first, remarks=remarks)
    return found


def remarks_on(ran: Sequence[Ran]) -> Iterator[Diagnosis]:
    """Yield a warning for each gap of one strategy, most specific first."""
    seen = set[str]()
    for use in sorted(_open(ran), key=lambda use: (_ORDER.index(use.feature), use.line)):
        what, option = _GAPS[use.feature]
        text = what.format(number=use.number)
        if text in seen:
            continue
        seen.add(text)
        option = option.format(after=use.number + 1)
        how = f"run it with {option}" if option else "test it in your own loop"
        yield name_cause("not-exercised", f"{text} (line {use.line})", "usual", how=how)


def _open(ran: Sequence[Ran]) -> Iterator[UsedFeature]:
    there = {feature for _, one in ran for feature in one.features}
    for use in dict.fromkeys(use for _, one in ran for use in one.uses):
        exercised = _EXERCISED.get(use.feature)
        known = use.feature in there or (exercised is not None and exercised(use, ran))
        if use.feature in _GAPS and not known:
            yield use
