"""A hook that lasts, and hooks of the code that are called exactly where torch calls them."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist

from distcheck.training.leaf_hooks import LeafHook, watch_registrations

ACTIONS = ("register", "broadcast", "backward")


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


def doubles(seen: list[str], name: str, gradient: torch.Tensor) -> torch.Tensor:
    """A hook of the code: what it is given, and twice that."""
    seen.append(f"{name}: {gradient[0]:g}")
    return 2 * gradient


def play(
    actions: tuple[str, ...], leaf: torch.Tensor, seen: list[str], before: Callable[[], None]
) -> None:
    """What a script does to a parameter; `before` is called before every backward."""
    for number, action in enumerate(actions):
        if action == "register":
            leaf.register_hook(partial(doubles, seen, str(number)))
        elif action == "broadcast":
            dist.broadcast(leaf, src=0)
        else:
            before()
            (leaf * 3).sum().backward()
            seen.append(f"= {leaf.grad[0]:g}")  # type: ignore[index]


@pytest.mark.filterwarnings("ignore:c10d..broadcast_")
@pytest.mark.parametrize("actions", list(itertools.product(ACTIONS, repeat=4)), ids="-".join)
@pytest.mark.parametrize("first", [True, False], ids=["ours first", "ours last"])
def test_hooks_of_the_code_run_as_without_us(first: bool, actions: tuple[str, ...]) -> None:
    """Also those that the code registered before ours, which still sees what came before them."""
    watch_registrations()
    alone, watched = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    expected: list[str] = []
    play((*actions, "backward"), alone, expected, lambda: None)
    seen: list[str] = []
    own: list[float] = []
    hooks: list[LeafHook] = []

    def before() -> None:
        if not hooks:
            hooks.append(LeafHook(watched, lambda gradient: own.append(float(gradient[0]))))
        hooks[0].put_back()

    if first:
        before()
    play((*actions, "backward"), watched, seen, before)
    assert seen == expected
    assert own == [3.0] * sum(one.startswith("=") for one in expected), "once in every backward"


def test_a_gradient_that_is_not_added_is_not_heard() -> None:
    leaf = torch.nn.Parameter(torch.ones(3))
    own: list[float] = []
    hook = LeafHook(leaf, lambda gradient: own.append(float(gradient[0])))
    leaf.register_hook(lambda gradient: 2 * gradient)
    torch.autograd.grad((leaf * 5).sum(), leaf)
    assert own == []
    hook.put_back()
    (leaf * 3).sum().backward()
    assert own == [3.0]


def test_it_says_whether_torch_would_call_it() -> None:
    leaf = torch.nn.Parameter(torch.ones(3))
    own: list[torch.dtype] = []
    hook = LeafHook(leaf, lambda gradient: own.append(gradient.dtype))
    assert hook.is_read
    leaf.data = leaf.data.double()
    assert not hook.is_read
    hook.put_back()
    assert hook.is_read
    leaf.sum().backward()
    assert own == [torch.float64]
    leaf.requires_grad_(False)
    assert hook.is_read  # a frozen leaf gets no gradient, so none goes past the hook
    hook.put_back()  # puts nothing on what is frozen
