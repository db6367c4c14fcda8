"""What all ranks of a world have said proves that it cannot go on; or it does not."""

from typing import Any

import msgspec
import pytest

from distcheck.records.posted_calls import PostedCall, all_to_all_splits, counts_that_must_match
from distcheck.worlds.local.children import Child
from distcheck.worlds.messages import Blocked, Unblocked
from distcheck.worlds.proofs import ProofWatch, prove_no_progress


def call(rank: int, number: int = 1, kind: str = "all_reduce", **about: Any) -> PostedCall:
    """A collective of three elements in the default group."""
    given: dict[str, Any] = {
        "op": "SUM" if kind == "all_reduce" else "", "counts": (3,), "dtype": "float32",
        "sizes": ((3,),), "place": f"sync.py:{10 * number}", "group": "0",
    }  # fmt: skip
    return PostedCall(kind=kind, name=kind, rank=rank, number=number, **{**given, **about})


def message(rank: int, kind: str, peer: int | None, number: int = 1, tag: int = 0) -> PostedCall:
    return PostedCall(
        kind=kind, name=kind, rank=rank, group="0", number=number, peer=peer, tag=tag,
        counts=(3,), dtype="float32", sizes=((3,),), place=f"sync.py:{rank}",
    )  # fmt: skip


def waits(*calls: PostedCall, world: int = 3, **about: Any) -> Blocked:
    """Waits for the last of its calls."""
    given: dict[str, Any] = {
        "on": (len(calls) - 1,) if calls else (),
        "posted": {"0": max((c.number for c in calls if not c.is_message), default=0)},
        "ranks": {"0": tuple(range(world))},
    }  # fmt: skip
    return Blocked(calls=list(calls), **{**given, **about})


def over(posted: int = 0) -> Blocked:
    return Blocked(over=True, posted={"0": posted}, ranks={"0": (0, 1, 2)})


def said_of(*said: Blocked) -> tuple[str, str]:
    found = prove_no_progress(dict(enumerate(said)))
    return ("", "") if found is None else (found.how, found.what)


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"kind": "broadcast", "root": 0}, "they differ in the operation"),
        ({"op": "MAX"}, "they differ in the reduce operation"),
        ({"counts": (4,), "sizes": ((4,),)}, "they differ in the number of elements"),
        ({"dtype": "float64"}, "they differ in the dtype"),
    ],
)
def test_different_calls_with_a_number_mismatch(about: dict[str, Any], words: str) -> None:
    about = {"kind": "all_reduce", **about}
    how, what = said_of(waits(call(0)), waits(call(1)), waits(call(2, place="other.py:7", **about)))
    assert how == "mismatch"
    assert words in what
    assert "ranks 0, 1 called all_reduce(SUM) of [3] float32 at sync.py:10" in what
    assert "other.py:7" in what
    assert "most ranks agree, and rank 2 made a different call" in what


def test_a_tie_is_said_to_be_one_and_absent_ranks_are_named() -> None:
    how, what = said_of(waits(call(0)), waits(call(1, op="MAX")), over())
    assert how == "mismatch"
    assert "rank 2 did not make it" in what
    assert "equally large" in what


def test_what_is_not_known_of_a_call_is_not_compared() -> None:
    unseen = call(2, op="", known=False)
    assert said_of(waits(call(0)), waits(call(1)), waits(unseen)) == ("", "")
    how, what = said_of(waits(call(0)), waits(call(1, op="MAX")), waits(unseen))
    assert how == "mismatch"
    assert "ranks 0, 2 called all_reduce(SUM)" in what, "it may be one of these"
    assert said_of(waits(call(0)), waits(call(1)), waits(call(2, counts=(4,), known=False)))[0]


def test_calls_that_all_ranks_have_posted_may_complete() -> None:
    assert said_of(waits(call(0)), waits(call(1)), waits(call(2))) == ("", "")
    later = waits(call(2), call(2, 2))  # complete there, and not here yet
    assert said_of(waits(call(0)), waits(call(1)), later) == ("", "")
    forgotten = waits(call(2, 2))  # the recorder has dropped the first one
    assert said_of(waits(call(0)), waits(call(1, op="MAX")), forgotten) == ("", "")


def test_a_rank_that_is_over_is_waited_for_in_vain() -> None:
    how, what = said_of(waits(call(0), call(0, 2)), waits(call(1), call(1, 2)), over(1))
    assert how == "deadlock"
    assert "ranks 0, 1 wait in all_reduce(SUM) of [3] float32, number 2 at sync.py:20" in what
    assert what.endswith("for rank 2; rank 2 finished")
    assert said_of(waits(call(0)), waits(call(1)), over(1)) == ("", "")
    assert said_of(over(), over(), over()) == ("", "")


def test_groups_in_another_order_are_a_deadlock() -> None:
    ranks = {"0": (0, 1, 2), "a": (0, 1), "b": (1, 2), "c": (0, 2)}
    pairs = {0: "a", 1: "b", 2: "c"}  # each waits for one who waits in another group

    def of(rank: int, **about: Any) -> Blocked:
        own = {name: ranks[name] for name in ranks if rank in ranks[name]}
        posted = {name: int(name == pairs[rank]) for name in own}
        return waits(call(rank, group=pairs[rank]), posted=posted, ranks=own, **about)

    assert said_of(of(0), of(1), of(2))[0] == "deadlock"
    assert said_of(of(0), of(1), of(2, alone=False)) == ("", ""), "a thread may post the call"
    several = of(2)
    several.calls.append(call(2, group="0"))
    several.on = (0, 1)
    several.posted["0"] = 1
    assert said_of(of(0), of(1), several)[0] == "deadlock", "neither can complete"


def test_a_group_that_ranks_know_in_different_ways_proves_nothing() -> None:
    other = waits(call(2, op="MAX"), ranks={"0": (1, 2)})
    assert said_of(waits(call(0)), waits(call(1)), other) == ("", "")


def messages_of(*posted: tuple[str, int, int]) -> list[tuple[str, str, int, int, int]]:
    """Kind, peer, how many."""
    return [("0", kind, peer, 0, count) for kind, peer, count in posted]


def test_receives_in_a_circle_are_a_deadlock_until_one_rank_sends() -> None:
    def of(rank: int, *more: tuple[str, int, int]) -> Blocked:
        behind = (rank - 1) % 3
        sent = messages_of(("recv", behind, 1), *more)
        return waits(message(rank, "recv", behind), messages=sent)

    how, what = said_of(of(0), of(1), of(2))
    assert how == "deadlock"
    assert "rank 0 waits in recv(from rank 2) of [3] float32, number 1 at sync.py:0, for" in what
    assert said_of(of(0), of(1), of(2, ("send", 0, 1))) == ("", ""), "posted, and on its way"
    assert said_of(of(0), of(1, ("send", 0, 1)), of(2))[0] == "deadlock", (
        "not to the one that waits"
    )


def test_a_send_waits_for_its_own_receive() -> None:
    sends = waits(message(0, "send", 1, number=2), messages=messages_of(("send", 1, 2)))
    first = waits(call(1), messages=messages_of(("recv", 0, 1)))
    assert said_of(sends, first, over(1))[0] == "deadlock"
    both = waits(call(1), messages=messages_of(("recv", 0, 2)))
    assert said_of(sends, both, over(1)) == ("", "")
    from_any = waits(call(1), messages=messages_of(("recv", 0, 1), ("recv", -1, 1)))
    assert said_of(sends, from_any, over(1)) == ("", ""), "the receive from any may take it"


def test_receives_from_any_wait_for_messages_that_have_not_come() -> None:
    receives = waits(
        message(0, "recv", None), messages=messages_of(("recv", -1, 2)), received=[("0", 0, 1)]
    )
    one = Blocked(over=True, posted={"0": 0}, ranks={"0": (0, 1, 2)})
    one.messages = messages_of(("send", 0, 1))
    assert said_of(receives, one, over())[0] == "unmatched", "the one that came was received"
    one.messages = messages_of(("send", 0, 2))
    assert said_of(receives, one, over()) == ("", "")


def test_a_message_of_another_size_is_a_mismatch() -> None:
    received = msgspec.structs.replace(
        waits(message(1, "recv", 0), world=2, messages=messages_of(("recv", 0, 1)))
    )
    received.calls[0].counts = (4,)
    sent = waits(message(0, "send", 1), world=2, messages=messages_of(("send", 1, 1)))
    how, what = said_of(sent, received)
    assert how == "mismatch"
    assert "they differ in the number of elements" in what


def test_splits_must_be_what_the_others_send() -> None:
    def of(rank: int, splits: tuple[int, ...]) -> Blocked:
        about = {"op": "", "counts": (), "in_splits": (1, 1, 1), "out_splits": splits}
        return waits(call(rank, kind="all_to_all", **about))

    assert said_of(of(0, (1, 1, 1)), of(1, (1, 1, 1)), of(2, (1, 1, 1))) == ("", "")
    how, what = said_of(of(0, (1, 1, 1)), of(1, (2, 1, 1)), of(2, (1, 1, 1)))
    assert how == "mismatch"
    assert "they differ in the split sizes" in what


class Heard(Child):
    """A child of which it is known now whether it runs."""

    now, runs = 0.0, False

    @property
    def known_at(self) -> float:
        return self.now

    @property
    def is_awake(self) -> bool:
        return self.runs


def test_a_proof_must_hold_for_a_moment_in_which_no_rank_runs() -> None:
    children, watch = [Heard(), Heard(), Heard()], ProofWatch()
    for child, said in zip(children, (waits(call(0)), waits(call(1)), over()), strict=True):
        assert watch.look(children, 0.0) is None, "not all have said that they wait"
        child.take(said)

    def look(now: float) -> bool:
        for child in children:
            child.now = now
        return watch.look(children, now) is not None

    assert not look(1.0)
    assert not look(1.2)
    children[0].runs = True
    assert not look(1.3)
    children[0].runs = False
    assert not look(1.5)
    assert look(1.6)
    children[1].take(Unblocked())
    assert not look(3.0)
    children[1].take(waits(call(1)))
    assert not look(3.1)
    assert look(3.4)


def test_what_must_be_alike_is_counted_in_elements() -> None:
    assert counts_that_must_match("scatter", [], [[2, 3]]) == (6,)
    assert counts_that_must_match("gather", [[2, 3]], [[4, 2, 3]]) == (6,)
    parts = [[2, 3]] * 4
    assert counts_that_must_match("reduce_scatter", parts, []) == counts_that_must_match(
        "reduce_scatter", [[8, 3]], []
    )
    single = "all_to_all_single"
    assert all_to_all_splits(single, (), [[6, 2]], [[6, 2]], 3) == ((4, 4, 4), (4, 4, 4))
    rows = ((1, 2, 3), (2, 2, 2))
    assert all_to_all_splits(single, rows, [[6, 2]], [[6, 2]], 3) == ((2, 4, 6), (4, 4, 4))
    assert all_to_all_splits("all_to_all", (), [[2], [3]], [[2], [2]], 2) == ((2, 3), (2, 2))
    assert all_to_all_splits(single, (), [], [], 0) == ((), ())


@pytest.mark.parametrize(
    "strange",
    [
        waits(call(1), on=(7,)),
        waits(call(1), on=(-1,)),
        waits(call(2)),
        waits(message(1, "send", 99)),
        waits(call(1, kind="broadcast", root=-1)),
        waits(call(1), ranks={"0": (0, 1, 2, 99)}),
        waits(call(1, kind="all_to_all", op="", in_splits=(1, 1, 1), out_splits=(1,))),
    ],
)
def test_what_no_rank_can_say_proves_nothing(strange: Blocked) -> None:
    """A process of the code under test may send anything."""
    others = waits(call(0)), waits(call(2, kind=strange.calls[0].kind, op=""))
    prove_no_progress({0: others[0], 1: strange, 2: others[1]})  # and raises nothing
    if strange.calls[0].kind != "all_to_all":
        assert prove_no_progress({0: others[0], 1: strange, 2: others[1]}) is None
