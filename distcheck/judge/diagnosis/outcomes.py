"""Causes that follow from ranks' exit status: crash, hang, collective-mismatch, unreachable."""

from collections.abc import Sequence

import msgspec

from distcheck.records import Diagnosis, Outcome
from distcheck.records.causes import name_cause
from distcheck.records.exit_status import MISUSES, RankEnd
from distcheck.records.odd_ranks import Key, first_call_mismatch, ranks_in_words

_MESSAGES = ("send", "recv")
_ZERO_BY_ZERO = "ZeroGradientError: "  # of adapters/forms/steps_inside.py

_WITHOUT_TRACEBACK = {RankEnd.EXITED: "exited", RankEnd.KILLED: "killed"}


def explain(outcomes: Sequence[Outcome]) -> list[Diagnosis]:
    """Return the cause of ranks that did not finish; empty if all did."""
    bad = [o for o in outcomes if o.outcome != RankEnd.FINISHED]
    if not bad:
        return []
    cause = bad[0]
    if cause.proven == "mismatch":
        return [name_cause("collective-mismatch", cause.why)]
    if cause.sizes_differ:
        return [_mismatch_cause(cause, outcomes)]
    if cause.outcome == RankEnd.LOST:
        lost = [o.rank for o in bad if o.outcome == RankEnd.LOST]
        return [name_cause("unreachable", f"{ranks_in_words(lost)}: {cause.ended_by}")]
    if cause.lost_peer:
        return [_lost_peer_cause(bad, [o.rank for o in outcomes if o.outcome == RankEnd.FINISHED])]
    by_zero = [o.rank for o in bad if o.error.startswith(_ZERO_BY_ZERO)]
    if cause.rank in by_zero:
        return [
            name_cause(
                "nonfinite",
                f"{ranks_in_words(by_zero)}: if every gradient is zero (for example of a layer "
                "that a batch does not use), the step makes parameters infinite or NaN",
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
                f"rank {cause.rank} {RankEnd(cause.outcome).in_words(last)}; other ranks failed "
                "after it",
                _WITHOUT_TRACEBACK.get(cause.outcome, "traceback"),
                rank=cause.rank,
            )
        ]
    found = _hang_cause(bad, [o.rank for o in outcomes if o.outcome == RankEnd.FINISHED])
    return [_replace_by_proof(found, cause)]


def _replace_by_proof(found: Diagnosis, hung: Outcome) -> Diagnosis:
    """Replace a cause by the proof of a simulated world, if any: a mismatch or a deadlock."""
    if hung.proven == "unmatched":
        return name_cause("unmatched-message", hung.why)
    if hung.proven == "asleep":
        return msgspec.structs.replace(found, evidence=hung.why)
    if hung.proven != "deadlock":
        return found
    evidence = f"no rank can proceed: {hung.why}"
    if found.cause == "hang":
        return name_cause("hang", evidence, "deadlock")
    return msgspec.structs.replace(found, evidence=evidence)


def _mismatch_cause(received: Outcome, outcomes: Sequence[Outcome]) -> Diagnosis:
    """Name a mismatch: the rank that received a message of another size is usually not the one with
    the wrong call.
    """
    apart = first_call_mismatch(_calls(outcomes))
    evidence = (
        f"rank {received.rank} received a message of a different size than its call expects; it "
        "is unknown which rank made the different call"
        if apart is None
        else apart.in_words()
    )
    return name_cause("collective-mismatch", evidence)


def _lost_peer_cause(lost: Sequence[Outcome], finished: Sequence[int]) -> Diagnosis:
    """Name ranks that lost a peer, which did not fail itself."""
    victims = ranks_in_words([o.rank for o in lost])
    if finished:
        return name_cause(
            "collective-mismatch",
            f"{ranks_in_words(finished)} finished and exited while {victims} still waited in a "
            "collective",
        )
    evidence = f"{victims} report that a peer exited, but no rank is known to have failed first"
    return name_cause("crash", evidence, "no-peer")


def _calls(outcomes: Sequence[Outcome]) -> dict[int, dict[Key, str]]:
    return {
        o.rank: {
            (call.group, call.point_to_point, call.number): call.with_shapes(call.shapes)
            for call in o.collectives
        }
        for o in outcomes
    }


def _hang_cause(hung: Sequence[Outcome], finished: Sequence[int]) -> Diagnosis:
    """Name a mismatch of ranks that are blocked in different collectives or wait for a finished
    rank; a hang if one rank is in no collective while others wait.
    """
    calls: dict[str, list[int]] = {}
    messages: dict[str, list[int]] = {}  # of backends that record them
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
    parts = [
        f"{ranks_in_words(ranks)} waited in {call}" for call, ranks in (calls | messages).items()
    ]
    if elsewhere:
        place = next((f", at {o.place}" for o in hung if [o.rank] == elsewhere and o.place), "")
        kept = ", and did not yield" if without_turn else ""
        be = "were" if len(elsewhere) > 1 else "was"
        parts.append(f"{ranks_in_words(elsewhere)} {be} in no collective{place}{kept}")
    parts += [f"{ranks_in_words(without_turn)} waited for the scheduler"] if without_turn else []
    parts += [f"{ranks_in_words(silent)} did not respond"] if silent else []
    parts += [f"{ranks_in_words(finished)} finished"] if finished else []
    evidence = "; ".join(parts)
    if stopped:
        names = ranks_in_words(stopped)
        was = f"{names} {'were' if len(stopped) > 1 else 'was'} stopped"
        evidence = "; ".join(filter(None, [was, evidence]))
        return name_cause("hang", evidence, "stopped", ranks=names)
    if len(calls) > 1 and (apart := first_call_mismatch(_calls(hung))) is not None:
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
