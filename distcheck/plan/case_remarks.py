"""Notes on a case's verdict, and reasons for leaving a case out."""

from collections.abc import Iterator, Sequence

from distcheck.contract import Contract, Training
from distcheck.judge.acceptance import parse_deviation
from distcheck.judge.oracles import integers
from distcheck.machine.numerics import unit_roundoff
from distcheck.plan.declined import why_words_declined
from distcheck.records import EXACT_DTYPES, Case
from distcheck.records.expected_events import ranks_required
from distcheck.records.generated_words import PREFIX
from distcheck.records.layers import FULL_BATCH_LAYERS, IN_FLOAT32, IN_FLOAT64
from distcheck.records.mesh import MESH, Mesh
from distcheck.training.jobs import CaseFacts
from distcheck.workloads import facts_about
from distcheck.workloads.cells import CELLS, why_declined

BUFFERS = (
    "buffers, such as BatchNorm's running statistics, are compared before the first step and "
    "between the two runs, but not with the single-process reference"
)
_NOT_DIVIDED = ("exact", "composite", "twelve_steps")  # workloads of the default run


def layout_notes(mesh: Mesh, sizes: Sequence[Sequence[int]]) -> Iterator[str]:
    if mesh.data == mesh.world:
        yield (
            "the code communicates in its forward pass, so ranks have no local gradients: full "
            "batch float32 and float64 judge, with the global batch in a single process"
        )
    else:
        yield _note_on_mesh(mesh)
    uneven = next((step for step in sizes if len(set(step)) > 1), None)
    if uneven is not None:
        yield _of_uneven([uneven[rank] for rank in mesh.readers])


def _of_uneven(sizes: Sequence[int]) -> str:
    shown = f"uneven shards ({' + '.join(map(str, sizes))})"
    return f"{shown}: each must be weighted by its number of samples (step.weight)"


def _note_on_mesh(mesh: Mesh) -> str:
    return (
        f"{MESH}{mesh}: {mesh.world // mesh.data} ranks share one model and the same samples. "
        "Sums across these ranks are rounded in a different order than in a single process, so "
        "full batch float32 and float64 judge outputs, gradients and losses, and the bitwise "
        "and rounding comparisons do not apply"
    )


def why_not_in_layout(case: Case, facts: CaseFacts) -> str:
    """Return the reason that a case cannot test a parallel layout; empty if it can."""
    workload = case.workload
    generated = workload.startswith(PREFIX)
    if workload in CELLS or generated:
        return "a layout shards the layers of the models that it was written for"
    if workload.partition(":")[0] in _NOT_DIVIDED:
        return (
            "a layout shards the layers of the models that it was written for; specify one "
            'in @strategy(workload="mlp") or with --workload, and it also runs in float64'
        )
    if case.dtype not in EXACT_DTYPES:
        return f"no reference has a bound for sums across ranks in {case.dtype}"
    if facts.draws_random_numbers:
        return (
            "the forward pass draws random numbers, and no reference can reproduce those of "
            "ranks that share a sample"
        )
    clips = facts.training.clip_norm is not None
    if clips and not facts.own_clip:
        return (
            "the loop would clip by the norm of a rank's shards; define clip(model, max_norm) in "
            "the strategy, computing the norm of the whole model"
        )
    if facts.training != Training(clip_norm=facts.training.clip_norm):
        return (
            "in a layout the loop does not accumulate, scale the loss or resume, which this "
            "workload requires; the strategy's own backward and step may do so"
        )
    return ""


_LONG_ENOUGH = {  # dtypes whose rounding a layer's bound covers
    IN_FLOAT32: ("float32", "float64", "complex64", "complex128"),
    IN_FLOAT64: ("float64", "complex128"),
}
_LEAST_NORMALIZED = 4
# Roundings that the rounding bound counts in one backward pass, in addition to one for each rank.
_MOST_OTHER_ROUNDINGS = 9
_BY_OTHERS = "bitwise and rounding are used instead"
_HARDLY_NORMALIZED = (
    "BatchNorm sees fewer than 4 samples at a time, so some gradients are only rounding: full "
    f"batch float32 and float64 have no bound for them, and {_BY_OTHERS}"
)
_ROWS_APART = (
    "BatchNorm receives rows that are not in sample order, so full batch float32 and float64 "
    f"cannot determine which rows a rank normalizes together: {_BY_OTHERS}"
)
SYNCED_STATISTICS = (
    "the strategy's file replaces the model's BatchNorm by SyncBatchNorm, which synchronizes "
    "statistics in the forward pass: local gradients cannot be recomputed, and it does not run "
    "on a CPU"
)
ONE_GROUP = (
    "the strategy's optimizer puts all parameters in one group, so the workload's groups do not "
    "exist and their settings are not checked"
)
NOT_REPEATED = (
    "the optimizer keeps state other than tensors and numbers per parameter and group, or draws "
    "random numbers. A rebuilt optimizer does not reproduce its step, so its step is not checked"
)

ONE_RANK = (
    "world size 1 has nothing to synchronize: it only shows that the code runs and does not "
    "change the gradients"
)


def notes_on_case(
    case: Case,
    sizes: Sequence[Sequence[int]],
    contract: Contract | None = None,
    *,
    by_tokens: bool = False,
) -> list[str]:
    """Return the notes on a case that a user should read with its verdict; `by_tokens` is True if
    its workload counts tokens.
    """
    mesh = contract.mesh(case.world) if contract is not None else None
    if mesh is not None:
        return list(layout_notes(mesh, sizes))
    notes = []
    if case.world == 1:
        notes.append(ONE_RANK)
    shards = len(case.with_data)
    if shards < case.world:
        without = ", ".join(str(r) for r in range(case.world) if r not in case.with_data)
        notes.append(
            f"rank {without} has no data (--without-data): it runs no forward and no backward "
            "pass, and its gradients are zero when the code is called; the expectation is the "
            f"mean over the {shards} with data"
        )
    if shards == 1 < case.world:
        notes.append(
            "only one rank has data, so there is nothing to average: the expectation is its "
            "local gradient"
        )
    if shards == 2:
        notes.append(
            f"{'world 2' if case.world == 2 else 'two ranks with data'} cannot distinguish "
            "reduction orders: every order adds the same two numbers"
        )
    contract = contract or Contract()
    if contract.sync == "out-of-sight":
        notes.append(
            "no hook can record the local gradients before the all-reduce: only the reduced "
            "gradients are checked"
        )
    if contract.optimizer_state == "sharded":
        notes.append("optimizer state is sharded: each shard is compared on the rank that holds it")
    if contract.gradients == "owner":
        notes.append(
            "gradients are recorded from the rank whose optimizer updates them; the gradients of "
            "other ranks are not compared"
        )
    if rounding_depends_on_position(case, contract):
        notes.append(
            f"in {case.dtype} the rounding of an update depends on an element's position, and "
            "ranks update shards: the optimizer's step need not be bit-identical, so it is not "
            "checked"
        )
    uneven = next((step for step in sizes if len(set(step)) > 1), None)
    if by_tokens:
        notes.append(
            "the loss is a mean over tokens: each rank must be weighted by its tokens, not by "
            "its samples (step.weight)"
        )
    elif uneven is not None:
        notes.append(_of_uneven(uneven))
    return notes


def why_left_out(case: Case, facts: CaseFacts, sizes: Sequence[Sequence[int]]) -> str:
    """Return the reason that a case cannot test a strategy; empty if it can."""
    contract = facts.contract
    if contract.parallel:
        why = why_not_in_layout(case, facts)
        return why or case.left_out or why_no_full_batch(case, facts, sizes)
    declined = case.left_out or why_declined(
        case.workload,
        contract,
        facts.training,
        own_update=facts.own_update,
    )
    declined = declined or why_words_declined(
        case.workload,
        contract,
        own_backward=facts.own_backward,
        own_update=facts.own_update,
    )
    declined = declined or _why_too_few_samples(case, sizes)
    declined = declined or _why_uneven(facts, sizes)
    declined = declined or _why_too_few_ranks(case, facts)
    if facts.syncs_statistics and facts.normalizes_batches:
        declined = declined or SYNCED_STATISTICS
    if declined := declined or _why_not_bounded(case, contract, facts.training.accumulate):
        return declined
    if case.reference_device is not None and facts.draws_random_numbers:
        return (
            f"it draws random numbers, which differ between {case.reference_device} and "
            f"{case.device}, so the two cannot be compared"
        )
    if case.reference_device is not None and (why := why_no_full_batch(case, facts, sizes)):
        only = f"compared with the {case.reference_device}, only full batch float32 could judge it"
        return f"{only}. {why}"
    accepted = parse_deviation(case.accept)
    if accepted is not None and accepted.combines_parameters and not facts.updates_again:
        return f"--accept {case.accept} is judged by each rank's local steps, but {NOT_REPEATED}"
    if "exact" not in case.layers:
        return ""
    return integers.why_wire_overflows(contract, shard_sizes=sizes)


def _why_too_few_samples(case: Case, sizes: Sequence[Sequence[int]]) -> str:
    least = facts_about(case.workload).least
    if min(map(min, sizes)) >= least:
        return ""
    batch = least * len(case.with_data)
    return f"each rank must have {least} samples; pass --batch {batch}"


def _why_uneven(facts: CaseFacts, sizes: Sequence[Sequence[int]]) -> str:
    """Return the reason that a strategy with its own backward cannot accumulate; empty if it can.

    Each of its backward calls averages over one piece, which equals the mean over the whole shard
    only for equal pieces.
    """
    passes = facts.training.accumulate
    if passes == 1 or not facts.own_backward:
        return ""
    parts = passes * facts.contract.micro_batches
    if all(len(set(step)) == 1 and step[0] % parts == 0 for step in sizes):
        return ""
    return (
        f"it runs backward itself, and the shards are uneven or do not divide into {parts} equal "
        "micro-batches"
    )


def _why_too_few_ranks(case: Case, facts: CaseFacts) -> str:
    """Return the reason that the tested event cannot occur in this world; empty if it can."""
    ranks, least = len(case.with_data), ranks_required(facts.must_happen)
    if ranks >= least:
        return ""
    return f"it needs at least {least} ranks with data to serve its purpose; this world has {ranks}"


def _why_not_bounded(case: Case, contract: Contract, passes: int) -> str:
    """Return the reason that rounding leaves no usable bound; empty if there is one.

    Each backward pass may exchange (`oracles/rounding.py`), so every one counts. At a relative
    bound of 1/2 per term the rounding errors can reach the sum itself, and a gradient of zero would
    pass.
    """
    accepted = parse_deviation(case.accept)
    lossy = accepted is not None and accepted.kind.one_exchange
    if lossy and case.workload == "loss_scaling":
        return (
            f"--accept {case.accept} has no bound for a gradient that overflows, and this "
            "workload has one"
        )
    if lossy and passes > 1:
        return (
            f"--accept {case.accept} has a bound for one all-reduce per step; each of its "
            f"{passes} backward passes may have one"
        )
    unit = max(map(unit_roundoff, (case.dtype, contract.wire or case.dtype)))
    if passes * (case.world + _MOST_OTHER_ROUNDINGS) * unit >= 1 / 2:
        what = "gradients" if passes == 1 else f"{passes} backward passes, each"
        return (
            f"{what} reduced over {case.world} ranks in {contract.wire or case.dtype} may have a "
            "rounding error as large as the sum itself, so no bound exists"
        )
    return ""


def rounding_depends_on_position(case: Case, contract: Contract) -> bool:
    """Return True if updating a tensor in pieces may give different bits than updating it at once.

    torch's CPU kernels round a short dtype once or twice, depending on whether an element is in a
    full vector register or in the remainder. Float32 and float64 are unaffected. Measured in
    bfloat16 and float16: one of 30 elements differs after a step of SGD.
    """
    return contract.optimizer_state == "cut" and case.dtype not in EXACT_DTYPES


def why_no_full_batch(case: Case, facts: CaseFacts, sizes: Sequence[Sequence[int]]) -> str:
    """Return the reason that the layers full batch float32 and float64 have no bound for a case.
    Empty if they have one, if the case has no such layer, or if random numbers are the reason.
    """
    layers = [layer for layer in FULL_BATCH_LAYERS if layer in case.layers]
    if not layers:
        return ""
    enough = _LONG_ENOUGH[layers[0]]
    if short := [dtype for dtype in facts.rounds_to if dtype not in enough]:
        return (
            f"the workload also computes in {' and '.join(short)}, in its parameters or its "
            f"forward pass: {layers[0]} has no bound for such rounding, and {_BY_OTHERS}"
        )
    if facts.rows_apart:
        return _ROWS_APART
    return _HARDLY_NORMALIZED if _hardly_normalized(facts, sizes) else ""


def _hardly_normalized(facts: CaseFacts, sizes: Sequence[Sequence[int]]) -> bool:
    """Return True if BatchNorm sees too few samples at a time for the bounds of full batch float32
    and float64.

    Over n samples a normalized value is at most sqrt(n - 1), and for n = 2 it is +1 or -1 for every
    input: its derivative is a difference of nearly equal numbers, so that two ways of computing it
    differ by any factor. Measured: correct code exceeded the bound of full batch float32 with 2 and
    3 samples, never with 4 or more.
    """
    if not facts.normalizes_batches:
        return False
    passes = facts.contract.micro_batches * facts.training.accumulate
    return min(map(min, sizes)) // passes < _LEAST_NORMALIZED


def why_not_judged_after_failure(failed: Case) -> str:
    """Return the reason for not judging a case after the first failure of a run."""
    return (
        f"not judged because of --fail-fast: {failed.workload} {failed.dtype} of "
        f"{failed.strategy} with "
        f"{failed.world} ranks has failed"
    )


def why_not_run_after_hang(case: Case, hung: Case) -> str:
    """Return the reason for not running a case of a strategy that hung in case `hung`."""
    return (
        f"not run: the strategy hung in {hung.workload} {hung.dtype}; --after-hang runs every "
        f"case, and --workload {case.workload} only this one"
    )
