"""The guard: right trainings pass, and each mistake in a running job is found and named."""

import copy
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import distcheck
from distcheck.errors import UsageError
from distcheck.job.guard import comparing, digests, explaining, records
from distcheck.job.guard.guarding import DivergenceError, Guard, GuardWarning
from distcheck.job.guard.records import Divergence, ReplicaFinding, TensorProjections
from distcheck.job.guard.state import FIELDS, ReplicaState

LATE = 7  # the step in which a mistake is made, long after a start that was right


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.drop, self.last = nn.Dropout(0.2), nn.Linear(8, 3)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(self.norm(self.first(x)))) * self.scale


@dataclass
class Job:
    """A right training; a mistake changes it before each step."""

    rank: int
    broadcasts: bool = True
    model: Any = None
    optimizer: Any = None
    data: torch.Generator = field(default_factory=torch.Generator)
    forward: Any = None

    def begin(self) -> None:
        torch.manual_seed(0)
        inner = Model()
        about = {} if self.broadcasts else {"broadcast_buffers": False}
        self.model = DistributedDataParallel(inner, **about)  # type: ignore[arg-type]
        self.forward = self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        torch.manual_seed(100 + self.rank)
        self.data.manual_seed(200 + self.rank)

    def step(self) -> None:
        inputs = torch.randn(4, 6, generator=self.data)
        labels = torch.randint(0, 3, (4,), generator=self.data)
        loss = F.cross_entropy(self.forward(inputs), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def train(job: Job, mistake: Callable[[Job, int], None], guard: Callable[[Job], Guard]) -> Guard:
    job.begin()
    mistake(job, 0)
    made = guard(job)
    for step in range(1, 11):
        mistake(job, step)
        job.step()
    made.close()
    return made


def right(job: Job, step: int) -> None:
    """Nothing is wrong."""


def another_start(job: Job, step: int) -> None:
    if step == 0 and job.rank == 1:
        with torch.no_grad():
            job.model.module.last.bias += 1


def writes_to_a_parameter(job: Job, step: int) -> None:
    if step == LATE and job.rank < 2:
        with torch.no_grad():
            job.model.module.last.bias[0] += 1e-6 * (1 + job.rank)


def one_rank_has_an_error(job: Job, step: int) -> None:
    if step == LATE and job.rank == 1:
        with torch.no_grad():
            job.model.module.last.bias[0] += 1e-7


def exchanges_no_longer(job: Job, step: int) -> None:
    if step == LATE:
        job.forward = job.model.module


def another_rate(job: Job, step: int) -> None:
    if step == LATE:
        job.optimizer.param_groups[0]["lr"] = 1e-2 * (1 + job.rank)


def another_buffer(job: Job, step: int) -> None:
    if step >= LATE:
        job.model.module.scale.fill_(1.0 + 1e-3 * job.rank)


def forgets_its_momentum(job: Job, step: int) -> None:
    def forget(*_: Any) -> None:
        state = job.optimizer.state[job.model.module.last.bias]
        if state["step"] == 10:  # the last one: parameters have no time to part
            state["exp_avg"].zero_()

    if step == 0 and job.rank == 1:
        job.optimizer.register_step_post_hook(forget)


def same_samples(job: Job, step: int) -> None:
    if step == LATE:
        job.data.manual_seed(1)


def same_masks(job: Job, step: int) -> None:
    if step == LATE:
        torch.manual_seed(1)


MISTAKES: tuple[tuple[Callable[[Job, int], None], set[str], str, int], ...] = (
    (another_start, {"initial state"}, "initial-state-differs", 2),
    (writes_to_a_parameter, {"parameters"}, "parameters-modified-outside-step", 10),
    (one_rank_has_an_error, {"parameters"}, "one-rank-differs", 10),
    (exchanges_no_longer, {"parameters"}, "missing-sync", 10),
    (another_rate, {"settings"}, "learning-rate-differs", 10),
    (another_buffer, {"buffers"}, "buffers-differ", 10),
    (forgets_its_momentum, {"optimizer state"}, "one-rank-differs", 10),
    (same_samples, {"samples"}, "same-data", 10),
    (same_masks, {"random streams"}, "shared-rng-seed", 10),
)


@pytest.mark.world([2, 3], reuse=True)
def test_a_right_training_passes(world: Any) -> None:
    job = Job(world.rank)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = train(job, right, lambda j: distcheck.guard(j.optimizer, every=5, save=None))
    assert (made.steps, made.checks, made.divergences, made.remarks) == (10, 3, [], [])
    assert made.compared == 6 + 18 + 2  # parameters, AdamW's state, buffers without statistics


@pytest.mark.world(3, reuse=True)
@pytest.mark.parametrize("case", MISTAKES, ids=lambda case: case[0].__name__)
def test_a_mistake_is_found_and_named(world: Any, case: Any, tmp_path: Path) -> None:
    mistake, kinds, cause, step = case
    job = Job(world.rank, broadcasts=mistake is not another_buffer)
    warnings.simplefilter("ignore")
    with pytest.raises(DivergenceError) as error:
        train(job, mistake, lambda j: distcheck.guard(j.optimizer, every=5, save=None))
    found = error.value.divergence
    assert kinds <= {one.kind for one in found.findings}
    assert (found.step, found.agreed_at) == (step, -1 if step == 2 else 5)
    assert [one.cause for one in explaining.causes(found)] == [cause]
    assert f"step {step}" in str(error.value)
    everywhere = world.gather(msgspec.json.encode(found))
    assert len(set(everywhere)) == 1  # all ranks conclude the same


@pytest.mark.world(2, reuse=True)
def test_the_first_parameter_the_ranks_and_the_bundle(world: Any, tmp_path: Path) -> None:
    job, heard = Job(world.rank), []
    folder = Path(world.gather(str(tmp_path))[0]) / "bundles"

    def begin(job: Job) -> Guard:
        return distcheck.guard(job.optimizer, every=5, on_difference=heard.append, save=str(folder))

    made = train(job, one_rank_has_an_error, begin)
    assert heard == made.divergences
    (found,) = heard
    first = found.findings[0]
    assert (first.first, first.groups, first.differing) == ("last.bias", ((0,), (1,)), 1)
    assert "they agreed at step 5" in found.text
    assert "last.bias differs between rank 0 and rank 1 (1 of 6 tensors differ" in found.text
    again = records.read(Path(found.file))
    assert (again.findings, again.sums) == (found.findings, found.sums)
    assert 0 < explaining.distance(again.sums[0]) < 1e-5
    assert [one.cause for one in explaining.causes(again)] == ["parameters-modified-outside-step"]


@pytest.mark.world(3, reuse=True)
def test_a_rank_that_ends_early_is_named_and_the_others_go_on(world: Any) -> None:
    """Ranks that exchange nothing of their own: else their own collective ends them."""
    job = Job(world.rank)
    job.begin()
    job.forward = job.model.module
    made = distcheck.guard(job.optimizer, every=4, on_difference=lambda _: None, save=None)
    for _ in range(3):
        job.step()
    if world.rank == 1:
        made.close()
    else:
        with pytest.warns(GuardWarning, match=r"rank 1 \(its guard ended after step 3\) did not"):
            job.step()
        job.step()
        assert made.is_closed
    world.gather(made.steps)


@pytest.mark.world(2, reuse=True)
@pytest.mark.parametrize("part", ["an audit", "digests", "a file's name"])
def test_ranks_in_different_parts_of_a_check_are_told_and_go_on(world: Any, part: str) -> None:
    """One sends numbers, the other bytes: gloo alone would mix them up, and JSON be damaged."""
    job = Job(world.rank)
    job.begin()
    made = distcheck.guard(job.optimizer, every=4, on_difference="warn", save=None)
    for _ in range(3):
        job.step()
    if world.rank == 1:
        made._check = lambda: made._peers.gather_bytes(b"x" * 1000, part)  # type: ignore[method-assign]
    with pytest.warns(GuardWarning, match=f"rank 0: numbers, rank 1: {part}"):
        job.step()
    assert made.is_closed
    job.step()
    assert world.gather(made.steps) == [4, 4]


@pytest.mark.world(2, reuse=True)
def test_a_difference_in_the_number_of_steps_is_found(world: Any) -> None:
    job = Job(world.rank)
    job.begin()
    made = distcheck.guard(job.optimizer, every=4, on_difference=lambda _: None, save=None)
    for _ in range(3):
        job.step()
    made.steps += world.rank  # as one that was given a step more
    job.step()
    if world.rank:
        made.check()
    (found,) = made.divergences[:1]
    assert found.findings[0].kind == "steps"


@pytest.mark.world(2, reuse=True)
def test_warns_once_for_a_kind_and_goes_on(world: Any) -> None:
    job = Job(world.rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        begin = lambda j: distcheck.guard(j.optimizer, every=1, on_difference="warn", save=None)  # noqa: E731
        made = train(job, one_rank_has_an_error, begin)
    assert made.steps == 10
    assert [one.step for one in made.divergences] == [7, 8, 9, 10]
    said = [w for w in caught if w.category is GuardWarning and "last.bias" in str(w.message)]
    assert len(said) == (1 if world.rank == 0 else 0)


@pytest.mark.world(2, reuse=True)
def test_statistics_of_batchnorm_are_a_remark(world: Any) -> None:
    job = Job(world.rank, broadcasts=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = train(job, right, lambda j: distcheck.guard(j.optimizer, every=5, save=None))
    assert made.divergences == []
    assert ["running statistics" in text for text in made.remarks] == [True]


@pytest.mark.world(2, reuse=True)
def test_divided_parameters_are_not_accused(world: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer: Any = torch.optim.AdamW(model.parameters())
    made = distcheck.guard(optimizer, every=2, save=None)
    drawn = torch.Generator().manual_seed(world.rank)
    for _ in range(4):
        model(torch.randn(4, 6, generator=drawn)).sum().backward()
        optimizer.step()
    assert (made.checks, made.divergences) == (2, [])
    made.close()

    whole = DistributedDataParallel(nn.Linear(6, 3))
    optimizer = ZeroRedundancyOptimizer(whole.parameters(), torch.optim.Adam, lr=1e-2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = distcheck.guard(optimizer, every=2, save=None)
        for _ in range(4):
            whole(torch.randn(4, 6, generator=drawn)).sum().backward()
            optimizer.step()
    assert (made.checks, made.divergences) == (2, [])
    assert made.compared >= 2
    made.close()


@pytest.mark.world(2, reuse=True)
def test_copies_and_files_of_the_model_have_no_guard(world: Any) -> None:
    job = Job(world.rank)
    job.begin()
    with distcheck.guard(job.optimizer, model=job.model, every=5, save=None) as made:
        job.step()
        inner = job.model.module
        copied = copy.deepcopy(inner)
        file = io.BytesIO()
        torch.save(inner, file)
        copied(torch.zeros(2, 6))
    assert made.is_closed
    assert not inner._forward_pre_hooks
    job.step()
    assert made.steps == 1


@pytest.mark.world(1, reuse=True)
def test_one_rank_compares_nothing_and_says_so(world: Any) -> None:
    job = Job(world.rank)
    with pytest.warns(GuardWarning, match="one rank, so nothing is compared"):
        made = train(job, right, lambda j: distcheck.guard(j.optimizer, every=5))
    assert made.checks == 0


def test_what_is_not_an_optimizer_is_refused() -> None:
    given: Any
    for given, about, said in (
        ("adam", {}, "takes a torch.optim.Optimizer, not str"),
        (torch.optim.SGD([nn.Parameter(torch.ones(1))]), {"every": 0}, "at least 1"),
        (torch.optim.SGD([nn.Parameter(torch.ones(1))]), {"on_difference": "stop"}, '"raise"'),
        (torch.optim.SGD([nn.Parameter(torch.ones(1))]), {"model": 3}, "a torch.nn.Module"),
    ):
        with pytest.raises(UsageError, match=said):
            distcheck.guard(given, **about)  # type: ignore[arg-type]


class Raises(nn.Linear):
    """A model whose parameters cannot be had."""

    def parameters(self, recurse: bool = True) -> Any:
        raise RuntimeError("not to be asked")


def hooks_of_all_modules() -> int:
    return len(nn.modules.module._global_forward_pre_hooks)


@pytest.mark.world(2, reuse=True)
def test_a_model_that_raises_is_not_looked_at(world: Any) -> None:
    model = Raises(6, 3)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    with distcheck.guard(optimizer, every=1, save=None) as made:
        model(torch.ones(4, 6)).sum().backward()
        optimizer.step()
        optimizer.step()
    assert made.checks == 2


@pytest.mark.world(2, reuse=True)
def test_a_guard_that_is_refused_leaves_no_hook(world: Any) -> None:
    before = hooks_of_all_modules()
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    for about in ({"audit": "fp8"}, {"group": "not a group"}):
        with pytest.raises(Exception):  # noqa: B017, PT011
            distcheck.guard(optimizer, **about)  # type: ignore[arg-type]
        assert hooks_of_all_modules() == before


def rows(**changes: list[Any]) -> list[dict[str, Any]]:
    """What three ranks say that agree, each with samples and masks of its own, and changes."""
    found: list[dict[str, Any]] = [
        dict.fromkeys(FIELDS, 5) | {"rows": {3 * r, 3 * r + 1}, "cpu_random": r + 1}
        for r in range(3)
    ]
    for row in found:
        row |= {"failed": 0, "device_random": 0}
    for name, values in changes.items():
        for row, value in zip(found, values, strict=True):
            row[name] = value
    return found


def test_numbers_that_agree_are_no_finding() -> None:
    assert comparing.differing_kinds(rows(), first=True) == []
    nothing_seen: dict[str, list[Any]] = {"rows": [set()] * 3, "cpu_random": [0, 0, 0]}
    assert comparing.differing_kinds(rows(**nothing_seen), first=True) == []
    one_in_common: list[Any] = [{1, 2, 3}, {3, 4, 5}, {6, 7, 8}]
    assert comparing.differing_kinds(rows(rows=one_in_common), first=True) == []


@pytest.mark.parametrize(
    ("field_", "kind"),
    [
        ("step", comparing.STEPS), ("names", comparing.NAMES), ("initial", comparing.INITIAL),
        ("parameters", comparing.PARAMETERS), ("divided", comparing.PARAMETERS),
        ("buffers", comparing.BUFFERS), ("state", comparing.STATE),
        ("state_names", comparing.STATE), ("settings", comparing.SETTINGS),
    ],
)  # fmt: skip
def test_every_number_that_differs_is_one_finding(field_: str, kind: str) -> None:
    assert comparing.differing_kinds(rows(**{field_: [5, 5, 6]}), first=True) == [kind]


@pytest.mark.parametrize("name", ["cpu_random", "device_random"])
def test_numbers_that_must_not_be_alike(name: str) -> None:
    assert comparing.differing_kinds(rows(**{name: [7, 8, 7]}), first=True) == [
        comparing.RANDOMNESS
    ]


def test_the_largest_group_with_one_stream_comes_first() -> None:
    said = [{"cpu_random": n, "device_random": 0} for n in (4, 4, 6, 6, 6, 0, 0, 0, 0)]
    assert comparing.groups_with_equal_streams(said) == ((2, 3, 4), (0, 1))


@pytest.mark.parametrize("second", [{1, 2, 3}, {2, 3, 4}], ids=["all", "most"])
def test_samples_that_two_ranks_have(second: set[int]) -> None:
    found = comparing.differing_kinds(rows(rows=[{1, 2, 3}, {7, 8, 9}, second]), first=True)
    assert found == [comparing.SAMPLES]


def test_parts_are_compared_among_ranks_that_hold_the_same_one() -> None:
    assert comparing.differing_kinds(rows(part=[1, 2, 1], divided=[5, 6, 5]), first=True) == []
    wrong = rows(part=[1, 2, 1], divided=[5, 6, 7])
    assert comparing.differing_kinds(wrong, first=True) == [comparing.PARAMETERS]
    assert comparing.divided_groups(wrong) == [(0, 2)]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(200_000, dtype=torch.float32), torch.ones(7, dtype=torch.bool),
        torch.ones(70_001, dtype=torch.bfloat16), torch.zeros(65_536, dtype=torch.int64),
        torch.ones(3, dtype=torch.complex64), torch.ones(5, 4).t(), torch.zeros(0),
    ],
    ids=lambda t: f"{t.dtype}{tuple(t.shape)}",
)  # fmt: skip
def test_digests_see_one_bit_anywhere(tensor: torch.Tensor) -> None:
    def both(one: torch.Tensor) -> tuple[int, int]:
        plain = torch.view_as_real(one) if one.is_complex() else one
        apart = (
            int(digests.sum_tree_on_device(plain.contiguous().reshape(-1))) if one.numel() else 0
        )
        return digests.digests([one])[0], apart

    seen = {both(tensor)}
    places = sorted({0, tensor.numel() // 2, tensor.numel() - 1}) if tensor.numel() else []
    for place in places:
        changed = tensor.clone().contiguous()
        bits = changed.view(-1).view(torch.uint8)
        bits[place * changed.element_size()] ^= 1
        seen.add(both(changed.reshape(tensor.shape)))
    assert len({one for one, _ in seen}) == len({two for _, two in seen}) == 1 + len(places)


def test_digests_see_the_order() -> None:
    one = torch.arange(150_000, dtype=torch.float32)
    other = one.clone()
    other[[3, 140_000]] = one[[140_000, 3]]
    assert int(digests.sum_tree_on_device(one)) != int(digests.sum_tree_on_device(other))
    assert digests.digests([one]) != digests.digests([other])


def bundle(**about: Any) -> Divergence:
    one = ReplicaFinding(kind="parameters", first="w", groups=((0,), (1,)), differing=2, compared=2)
    given = {"step": 200, "agreed_at": 100, "every": 100, "ranks": (0, 1), "findings": (one,)}
    return Divergence(**{**given, **about})


def sums(apart: float) -> tuple[TensorProjections, ...]:
    return (TensorProjections(name="w", elements=64, by_rank=((1.0,) * 64, (1.0 + apart,) * 64)),)


STATE = ReplicaFinding(kind="optimizer state", first="exp_avg of w", groups=((0,), (1,)))
HALF = ReplicaFinding(kind="parameters", first="w", groups=((0,), (1,)), differing=1, compared=2)


@pytest.mark.parametrize(
    ("about", "cause"),
    [
        ({"sums": sums(1e-2)}, "missing-sync"),
        ({"sums": sums(1e-8)}, "unexplained"),  # rounding, or a small learning rate
        ({"sums": sums(1e-8), "state_compared": 2}, "parameters-modified-outside-step"),
        ({"sums": sums(1e-2), "findings": (HALF,)}, "partial-sync"),
    ],
)
def test_causes_of_a_bundle(about: dict[str, Any], cause: str) -> None:
    assert [one.cause for one in explaining.causes(bundle(**about))] == [cause]


def test_rounding_of_state_and_parameters_is_named() -> None:
    one = bundle().findings[0]
    found = bundle(sums=sums(1e-8), state_compared=2, findings=(one, STATE))
    assert [cause.cause for cause in explaining.causes(found)] == ["nondeterministic"]
    apart = bundle(sums=sums(1e-1), state_compared=2, findings=(one, STATE))
    assert [cause.cause for cause in explaining.causes(apart)] == ["missing-sync"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not a bundle"),
        (b"\xff{", "is not a bundle"),
        (msgspec.json.encode(bundle(schema="distcheck.guard/9")), "has the schema"),
        (msgspec.json.encode(bundle(findings=())), "has no finding"),
        (msgspec.json.encode(bundle(ranks=(0, 1, 2), sums=sums(1.0))), "do not match its ranks"),
    ],
)
def test_a_damaged_bundle_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "bundle.json"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=said):
        records.read(file)
    with pytest.raises(UsageError, match="cannot be read"):
        records.read(tmp_path / "missing.json")


def test_bundles_have_names_of_their_own(tmp_path: Path) -> None:
    files = {records.write(bundle(), tmp_path / "new") for _ in range(3)}
    assert len(files) == 3


def test_what_is_new_in_the_table_is_found_by_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind of its own is a number of a rank, its line in `ALIKE`, and the names behind it."""
    monkeypatch.setitem(comparing.ALIKE, "statistics", ("statistics", "statistics"))
    monkeypatch.setattr(comparing, "NAMED", (*comparing.NAMED, "statistics"))
    made: Any = Guard.__new__(Guard)
    own = ReplicaState(statistics={"norm.running_mean": 7})
    other = {**{name: {} for name in comparing.NAMED}, "statistics": {"norm.running_mean": 9}}

    def gather(mine: bytes, part: str) -> list[bytes]:
        return [mine, msgspec.json.encode(other if b"running_mean" in mine else {})]

    made._peers = SimpleNamespace(ranks=(0, 1), gather_bytes=gather)
    rows = [{**dict.fromkeys(FIELDS, 0), "rows": set(), "statistics": n} for n in (7, 9)]
    kinds = comparing.differing_kinds(rows, first=False)
    assert kinds == ["statistics"]
    ((found,), _) = made._look_closer(kinds, own, rows)
    assert (found.first, found.groups) == ("norm.running_mean", ((0,), (1,)))
    difference = Divergence(
        step=5, agreed_at=2, every=5, ranks=(0, 1), findings=(found,), sums=(), state_compared=0,
        optimizer="", wrapper="", versions={},
    )  # fmt: skip
    assert "step 5: statistics norm.running_mean differs between rank 0 and rank 1" in (
        difference.text
    )
    monkeypatch.setitem(comparing.ALIKE, "statistics", ("statistics", ""))
    ((found,), _) = made._look_closer(kinds, own, rows)
    assert found.groups == ((0,), (1,)), "a number alone tells the ranks apart as well"
    alone = msgspec.structs.replace(difference, findings=(found,))
    assert alone.text == (
        "step 5: statistics differ between rank 0 and rank 1; they agreed at step 2"
    )
