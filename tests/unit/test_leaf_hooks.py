"""A hook that lasts, and hooks of the code that are called exactly where torch calls them."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist

from distcheck.training.leaf_hooks import LeafHook

ACTIONS = ("register", "broadcast", "backward")


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


def note(seen: list[str], name: str, gradient: torch.Tensor) -> None:
    seen.append(name)


def play(
    actions: tuple[str, ...], leaf: torch.Tensor, seen: list[str], before: Callable[[], None]
) -> None:
    """What a script does to a parameter; `before` is called before every backward."""
    for number, action in enumerate(actions):
        if action == "register":
            leaf.register_hook(partial(note, seen, str(number)))
        elif action == "broadcast":
            dist.broadcast(leaf, src=0)
        else:
            before()
            (leaf * 2).sum().backward()
            seen.append("|")


@pytest.mark.filterwarnings("ignore:c10d..broadcast_")
@pytest.mark.parametrize("actions", list(itertools.product(ACTIONS, repeat=4)), ids="-".join)
def test_hooks_of_the_code_are_called_as_without_ours(actions: tuple[str, ...]) -> None:
    alone, watched = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    expected: list[str] = []
    play((*actions, "backward"), alone, expected, lambda: None)
    seen: list[str] = []
    ours = LeafHook(watched, partial(note, seen, "ours"))
    play((*actions, "backward"), watched, seen, ours.put_back)
    assert [name for name in seen if name != "ours"] == expected
    assert seen.count("ours") == expected.count("|"), "once in every backward"
    firsts = [seen[0], *(after for before, after in itertools.pairwise(seen) if before == "|")]
    assert set(firsts) == {"ours"}, "before any other"


@pytest.mark.filterwarnings("ignore:c10d..broadcast_")
def test_it_says_whether_torch_would_call_it() -> None:
    leaf = torch.nn.Parameter(torch.ones(3))
    hook = LeafHook(leaf, partial(note, [], "ours"))
    assert hook.is_read
    handle = leaf.register_hook(partial(note, [], "other"))
    assert hook.is_read
    handle.remove()
    dist.broadcast(leaf.data, src=0)
    assert hook.is_read
    dist.broadcast(leaf, src=0)
    torch.ones(1, requires_grad=True).sum().backward()  # that of torch which forgets is in 2.15
    if not hook.is_read:
        hook.put_back()
    assert hook.is_read
