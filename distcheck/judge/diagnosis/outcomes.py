"""Causes that show in how ranks ended: crash, hang, collective-mismatch, unreachable."""

from collections.abc import Sequence

import msgspec

from distcheck.records import Diagnosis, Outcome
from distcheck.records.causes import name_cause
from distcheck.records.exit_status import MISUSES, RankEnd
from distcheck.records.odd_ranks import Key, call_mismatch, ranks_in_words

_MESSAGES = ("send", "recv")
_ZERO_BY_ZERO = "ZeroGradientError: "  # of adapters/forms/steps_inside.py

_WITHOUT_TRACEBACK = {RankEnd.EXITED: "exited", RankEnd.KILLED: "killed"}


def explain(outcomes: Sequence[Outcome]) -> list[Diagnosis]:
    """The cause of ranks that did not finish; nothing where all did."""
    bad = [o for o in outcomes if o.outcome != RankEnd.FINISHED]
    if not bad:
        return []
    cause = bad[0]
    if cause.proven == "mismatch":
        return [name_cause("collective-mismatch", cause.why)]
    if cause.sizes_differ:
        return [_of_mismatch(cause, outcomes)]
    if cause.outcome == RankEnd.LOST:
        lost = [o.rank for o in bad if o.outcome == RankEnd.LOST]
        return [name_cause("unreachable", f"{ranks_in_words(lost)}: {cause.ended_by}")]
    if cause.lost_peer:
        return [_of_victims(bad, [o.rank for o in outcomes if o.outcome == RankEnd.FINISHED])]
    by_zero = [o.rank for o in bad if o.error.startswith(_ZERO_BY_ZERO)]
    if cause.rank in by_zero:
        return [
            name_cause(
                "nonfinite",
                f"{ranks_in_words(by_zero)}: where every gradient is zero, as that of a layer is "
                "which a batch does not use, the step leaves parameters that are infinite or NaN",
                "by-zero",
            )
        ]
    if cause.proven in MISUSES:
        return [name_cause(cause.proven, cause.why)]
    if cause.outcome != RankEnd.HUNG:
        last = cause.where or cause.ended_by or cause.text.partition("\n")[0]
        return [
            name_cause(
                "crash",
                f"rank {cause.rank} {cause.outcome} ({last}); what other ranks report came after "
                "it",
                _WITHOUT_TRACEBACK.get(cause.outcome, "traceback"),
                rank=cause.rank,
            )
        ]
    found = _of_hang(bad, [o.rank for o in outcomes if o.outcome == RankEnd.FINISHED])
    return [_as_proven(found, cause)]


def _as_proven(found: Diagnosis, hung: Outcome) -> Diagnosis:
    """What a simulated world says of itself, where it does: calls that do not match, or ranks that
    all wait.
    """
    if hung.proven == "unmatched":
        return name_cause("unmatched-message", hung.why)
    if hung.proven == "asleep":
        return msgspec.structs.replace(found, evidence=hung.why)
    if hung.proven != "deadlock":
        return found
    evidence = f"no rank can go on: {hung.why}"
    if found.cause == "hang":
        return name_cause("hang", evidence, "deadlock")
    return msgspec.structs.replace(found, evidence=evidence)


def _of_mismatch(received: Outcome, outcomes: Sequence[Outcome]) -> Diagnosis:
    """The rank that received a message of another size is as a rule not the one that called
    something else.
    """
    apart = call_mismatch(_calls(outcomes))
    evidence = (
        f"rank {received.rank} received a message of another size than its own call expects; "
        "which rank called something else is not known"
        if apart is None
        else apart.in_words()
    )
    return name_cause("collective-mismatch", evidence)


def _of_victims(lost: Sequence[Outcome], finished: Sequence[int]) -> Diagnosis:
    """Every rank that did not finish had lost another one, which did not fail itself."""
    victims = ranks_in_words([o.rank for o in lost])
    if finished:
        return name_cause(
            "collective-mismatch",
            f"{ranks_in_words(finished)} finished and left, and {victims} still waited in a "
            "collective",
        )
    evidence = f"{victims} lost their peers, and no rank is known to have failed before that"
    return name_cause("crash", evidence, "no-peer")


def _calls(outcomes: Sequence[Outcome]) -> dict[int, dict[Key, str]]:
    return {
        o.rank: {
            (call.group, call.point_to_point, call.number): f"{call.name} of [{call.shapes}]"
            for call in o.collectives
        }
        for o in outcomes
    }


def _of_hang(hung: Sequence[Outcome], finished: Sequence[int]) -> Diagnosis:
    """Ranks in different collectives, or waiting for one that has left: a mismatch. A rank that
    is in no collective, while the others wait for it: a hang of that rank's own.
    """
    calls: dict[str, list[int]] = {}
    messages: dict[str, list[int]] = {}  # of those backends that record them
    elsewhere = []
    silent = []
    without_turn = [outcome.rank for outcome in hung if outcome.silence == "no turn"]
    stopped = [outcome.rank for outcome in hung if outcome.silence == "stopped"]
    for outcome in hung:
        call = outcome.call
        if outcome.rank in stopped or outcome.rank in without_turn:
            continue
        if outcome.silence == "no answer":
            silent.append(outcome.rank)
        elif call is None or call.finished:
            elsewhere.append(outcome.rank)
        else:
            of_its_kind = messages if call.name in _MESSAGES else calls
            of_its_kind.setdefault(call.call, []).append(outcome.rank)
    parts = [f"{ranks_in_words(ranks)} in {call}" for call, ranks in (calls | messages).items()]
    if elsewhere:
        place = next((f", at {o.place}" for o in hung if [o.rank] == elsewhere and o.place), "")
        kept = ", and kept its turn" if without_turn else ""
        parts.append(f"{ranks_in_words(elsewhere)} in no collective{place}{kept}")
    parts += [f"{ranks_in_words(without_turn)} waited for a turn"] if without_turn else []
    parts += [f"{ranks_in_words(silent)} did not answer"] if silent else []
    parts += [f"{ranks_in_words(finished)} finished"] if finished else []
    evidence = "; ".join(parts)
    if stopped:
        evidence = "; ".join(filter(None, [f"{ranks_in_words(stopped)} was stopped", evidence]))
        return name_cause("hang", evidence, "stopped", ranks=ranks_in_words(stopped))
    if len(calls) > 1 and (apart := call_mismatch(_calls(hung))) is not None:
        evidence += f"; {apart.in_words()}"
    if len(calls) > 1 or (calls and finished):
        return name_cause("collective-mismatch", evidence)
    where = elsewhere or ([] if silent else next(iter((messages | calls).values())))
    return name_cause(
        "hang",
        f"no progress until the deadline: {evidence}",
        "stack" if where else "silent",
        ranks=ranks_in_words(where or silent),
    )
