"""Features that a strategy's code uses without any case exercising them, and the options that do.

A pass shows nothing about them, and among all uncovered properties they matter most. Features are
derived from the code as hints (`training/adapters/uses.py`): they fail nothing. No torch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from distcheck.records import CaseReport, Contents, Diagnosis
from distcheck.records.causes import name_cause
from distcheck.records.run_facts import Use

# By feature: the uncovered property, and the option that covers it. Features in
# `contents._FEATURES` are exercised if a case has them, the others as in `_EXERCISED`.
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
_EXERCISED: Mapping[str, Callable[[Use, Sequence[Contents]], bool]] = {
    "late": lambda use, cases: use.number < max(case.steps for case in cases),
    "size": lambda use, cases: use.number < max(case.most_elements for case in cases),
    "world": lambda use, cases: len({case.world for case in cases}) > 2,
    "huge": lambda use, cases: max((s for case in cases for s in case.sizes), default=0) > 1e29,
    "denormal": lambda use, cases: min((s for c in cases for s in c.sizes), default=1) < 1e-38,
    "draws": lambda use, cases: False,
    "narrow": lambda use, cases: max(case.most_elements for case in cases) > 1 << 24,
    "default_dtype": lambda use, cases: any("several_dtypes" in case.features for case in cases),
    "closure": lambda use, cases: False,
    "async": lambda use, cases: any(case.schedules for case in cases),
}


def with_remarks(reports: Sequence[CaseReport]) -> list[CaseReport]:
    """Return the reports, with a warning per gap in the first report of each passing strategy."""
    found = list(reports)
    for strategy in dict.fromkeys(report.case.strategy for report in reports):
        own = [n for n, report in enumerate(reports) if report.case.strategy == strategy]
        contents = [one for n in own if (one := reports[n].contents) is not None]
        if contents and all(reports[n].verdict == "pass" for n in own):
            first = reports[own[0]]
            remarks = (*first.remarks, *remarks_on(contents))
            found[own[0]] = msgspec.structs.replace(first, remarks=remarks)
    return found


def remarks_on(cases: Sequence[Contents]) -> Iterator[Diagnosis]:
    """Yield a warning for each gap of one strategy, the most specific ones first."""
    seen = set[str]()
    for use in sorted(_open(cases), key=lambda use: (_ORDER.index(use.feature), use.line)):
        what, option = _GAPS[use.feature]
        text = what.format(number=use.number)
        if text in seen:
            continue
        seen.add(text)
        option = option.format(after=use.number + 1)
        how = f"run it with {option}" if option else "test it in your own loop"
        yield name_cause("not-exercised", f"{text} (line {use.line})", "usual", how=how)


def _open(cases: Sequence[Contents]) -> Iterator[Use]:
    there = {feature for case in cases for feature in case.features}
    for use in dict.fromkeys(use for case in cases for use in case.uses):
        exercised = _EXERCISED.get(use.feature)
        known = use.feature in there or (exercised is not None and exercised(use, cases))
        if use.feature in _GAPS and not known:
            yield use
