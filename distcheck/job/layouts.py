"""Finds causes of wrong gradients in model-parallel jobs, by the mesh axis along which
they occur.
"""

import math
from collections.abc import Mapping, Sequence

from distcheck.job.checks.reference import gradient_tolerances, paired_losses, reference_gradients
from distcheck.job.replaying import Reference
from distcheck.judge.diagnosis import layouts
from distcheck.judge.diagnosis.layout_measuring import GradientVersions
from distcheck.judge.diagnosis.measurements import LayoutFacts, LayoutParameter
from distcheck.judge.diagnosis.wording import first_names_text
from distcheck.judge.divergence.noise_floor import norm_of
from distcheck.judge.fitting import fit_least_squares
from distcheck.recordings.jobs.reading import STEMS, JobRecording
from distcheck.recordings.jobs.records import MeshAxis
from distcheck.recordings.jobs.unsharded import mesh_of, unsharded_tensor
from distcheck.recordings.recording import Kind
from distcheck.records import CheckResult, Diagnosis
from distcheck.records.causes import name_cause
from distcheck.records.layers import IN_FLOAT32
from distcheck.records.mesh import Mesh

# Heuristic: clipping leaves a norm with a relative rounding error of 1e-6; the norm of another set
# of elements differs much more.
_SAME_NORM = 1e-4
Failed = Mapping[tuple[str, str], CheckResult]


def explain(job: JobRecording, reference: Reference, failed: Failed) -> list[Diagnosis]:
    """Explain the gradients of ranks that share a model, by comparison with the reference."""
    wrong = failed.get(("gradients", IN_FLOAT32)) or failed.get(("loss", IN_FLOAT32))
    later = failed.get(("agreement", "-"))
    if wrong is None and later is not None and job.apart is not None and job.world == 1:
        return layouts.explain(failed, LayoutFacts(step=0, axes=(), micro_batches=1, total=0))
    if wrong is None or wrong.first is None or job.apart is None:
        return []
    if later is not None and later.first is not None and later.first.step < wrong.first.step:
        return []  # a consequence of diverged parameters
    step = wrong.first.step
    facts = _facts(job, job.apart, reference, step, failed)
    if facts is None:
        return []
    clipped = [] if facts.loss_is_wrong else _detect_clip_norm(job, job.apart, reference, facts)
    return clipped or layouts.explain(failed, facts)


def _detect_clip_norm(
    job: JobRecording, apart: JobRecording, reference: Reference, facts: LayoutFacts
) -> list[Diagnosis]:
    """Detect clipping by a norm that does not cover each gradient element once. After correct
    clipping the total norm is the maximum, as in the reference.
    """
    step, total = facts.step, len(job.parameters(facts.step))
    right = reference_gradients(reference.tensors(step), Kind.GRADIENT)
    allowed = math.hypot(*(norm_of(g) for g in right.values()))
    parts = [part for r in apart.at(step) for k, part in r.parts.items() if k.startswith("step/")]
    group = max([*job.replicas, *(part.of for part in parts)], key=len)
    if not parts or len(group) < 2 or len(facts.parameters) < total or not allowed:
        return []
    norms = []
    for rank in group:
        names = apart.parameters(step)
        held = [apart.gradient(Kind.GRADIENT, rank, step, name) for name in names]
        norms.append(math.hypot(*(norm_of(one) for one in held if one is not None)))
    said = f"step {step}: after clipping, the gradients of a single process have norm {allowed:.6g}"
    if all(abs(norm - allowed) <= _SAME_NORM * allowed for norm in norms):
        return [name_cause(
            "clip-by-local-norm", f"{said}, and here the shards of each rank by themselves do"
        )]  # fmt: skip
    whole = [n for n in apart.parameters(step) if f"step/{n}" not in apart.at(step)[group[0]].parts]
    count, ranks = len(group), ", ".join(map(str, group))
    square, by = math.hypot(*norms), f"if the tensors of ranks {ranks} are clipped by"
    wrong_norms = {
        f"a norm that includes {first_names_text(whole, 4)}, which every rank holds, {count} times":
            square,
        f"the mean of these ranks' norms, {count} of different shards": sum(norms) / count,
        f"a norm that includes shards, which only one rank holds, 1/{count} times":
            square / math.sqrt(count),
    }  # fmt: skip
    fits = [k for k, one in wrong_norms.items() if abs(one - allowed) <= _SAME_NORM * allowed]
    if len(fits) != 1:
        return []
    return [name_cause("clip-norm-includes-replicas", f"{said}, and here {by} {fits[0]}")]


def _facts(
    job: JobRecording, apart: JobRecording, reference: Reference, step: int, failed: Failed
) -> LayoutFacts | None:
    axes = job.ranks[0].axes
    mesh = mesh_of([_rename_axis(axis) for axis in axes])
    if mesh is None or len({name for name, _ in mesh.axes}) < len(mesh.axes):
        return None
    # Changes by the script itself appear only in the optimizer gradients.
    by_hand = any(one.changes for one in reference.replayed.steps if one.step == step)
    kind = Kind.GRADIENT if by_hand else Kind.EXCHANGED
    times = _undo_clipping(apart, reference, step, kind)
    wrong, right = _measure(job, apart, reference, step, mesh, kind, times)
    loss, expected_loss, bound = paired_losses(job, reference, step)
    pipeline = any(axis.kind == "pipeline" for axis in axes)
    return LayoutFacts(
        step=step,
        axes=tuple(("data" if a.kind == "expert" else _rename_axis(a).name, a.size) for a in axes),
        micro_batches=len(job.records[0, step].trained) if pipeline else 1,
        total=len(job.parameters(step)),
        parameters=tuple(wrong),
        right=tuple(right),
        loss_is_wrong=("loss", IN_FLOAT32) in failed
        and abs(loss - expected_loss) > bound
        and not _is_scaled(wrong, len(job.parameters(step)), loss / (expected_loss or math.inf)),
        loss=loss,
        expected_loss=expected_loss,
        apart=_losses_differ(job, apart, step, bound),
    )


def _is_scaled(wrong: Sequence[LayoutParameter], total: int, ratio: float) -> bool:
    """Return True if all gradients and the loss are the same multiple of the reference."""
    factors = [one.factor for one in wrong if one.factor is not None]
    alike = all(abs(one - ratio) <= _SAME_NORM * abs(ratio) for one in factors)
    return alike and len(factors) == total


def _measure(
    job: JobRecording, apart: JobRecording, reference: Reference, step: int, mesh: Mesh,
    kind: Kind, times: Mapping[int, float],
) -> tuple[list[LayoutParameter], list[str]]:  # fmt: skip
    """Return the wrong gradients, and the modules after the last of them, whose gradients are
    correct. The gradients of some ranks are first multiplied by `times`.
    """
    found, wrong, right = reference.tensors(step), list[LayoutParameter](), list[str]()
    bounds, stem = gradient_tolerances(job, found, step), STEMS[kind]
    for name in job.parameters(step):
        plain = name.rpartition(": ")[2]
        key = f"{stem}/{plain}"
        held = [unsharded_tensor(apart, rank, step, key, times) for rank in range(apart.world)]
        without = [r for r in range(apart.world) if not apart.holds(r, step, plain)]
        expected = found.get(f"{stem}/{name}")
        if expected is None or any(h is not None and h.shape != expected.shape for h in held):
            continue
        rough = bool(times) or stem == "step"
        allowed = max(bounds.get(name, 0.0), rough * _SAME_NORM * norm_of(expected))
        one = GradientVersions(held, expected, mesh, allowed, without).of(name)
        wrong += [] if one is None else [one]
        right = [*right, name.rpartition(".")[0]] if one is None else []
    return wrong, [*dict.fromkeys(right)]


def _undo_clipping(
    apart: JobRecording, reference: Reference, step: int, kind: Kind
) -> dict[int, float]:
    """Return factors that undo clipping by a wrong total norm. If the gradients of a rank have
    several factors, the factor is the most common one, or else that of the last parameter.
    """
    found, times, others = reference.tensors(step), dict[int, float](), False
    for rank, record in enumerate(apart.at(step)):
        factors = []
        for name in apart.parameters(step):
            held = apart.gradient(kind, rank, step, name)
            expected = found.get(f"{STEMS[kind]}/{name}")
            if held is None or expected is None or not held.numel():
                continue
            part = record.parts.get(f"{STEMS[kind]}/{name}")
            begins = part.at if part is not None else (0,) * held.dim()
            pairs = zip(begins, held.shape, strict=True)
            expected = expected[tuple(slice(a, a + size) for a, size in pairs)]
            fitted = fit_least_squares([(held, expected)]) if held.shape == expected.shape else None
            if fitted is not None:
                is_multiple = fitted.share <= _SAME_NORM
                factors.append(fitted.factors[0] if is_multiple else math.nan)
        known = sorted(one for one in factors if one == one)
        usual = known[len(known) // 2] if known else 0.0
        alike = sum(abs(one - usual) <= _SAME_NORM * abs(usual) for one in known)
        others = others or alike < len(factors)
        if alike * 2 < len(factors) and known:  # backward starts at the last one
            usual = next(one for one in reversed(factors) if one == one)
        if usual and abs(usual - 1) > _SAME_NORM:
            times[rank] = 1 / usual
    return times if others else {}


def _rename_axis(axis: MeshAxis) -> MeshAxis:
    name = "data" if axis.kind == "data" else axis.name
    return MeshAxis(name=name, kind=axis.kind, size=axis.size)


def _losses_differ(job: JobRecording, apart: JobRecording, step: int, bound: float) -> bool:
    """Return True if ranks that compute one loss together have different values of it."""
    if any(axis.kind in ("sequence", "pipeline") for axis in job.ranks[0].axes):
        return False
    for replica in job.replicas:
        losses = [sum(p.loss or 0.0 for p in apart.records[rank, step].trained) for rank in replica]
        if not math.isclose(min(losses), max(losses), rel_tol=0.0, abs_tol=2 * bound):
            return True
    return False
