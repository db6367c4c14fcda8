"""`@pytest.mark.world(4, backend="simulated")`: ranks that are threads of the test's process."""

import re
import subprocess
from collections.abc import Callable

from tests.optional import needs

pytestmark = needs("simulated")

Run = Callable[..., subprocess.CompletedProcess[str]]

HEAD = """
import logging, os, random, time, warnings
import torch, torch.distributed as dist
threads = pytest.mark.world(3, backend="simulated")
"""

# Each of these fails where ranks share what each of them would have for itself in a process.
OWN = """
count, seen, weights = 0, {"deep": []}, torch.zeros(2)
net = torch.nn.Linear(1, 1)

@pytest.fixture
def model(): return torch.nn.Linear(2, 1)

@pytest.fixture
def ranks_own(world, model):
    yield world.rank, model
    print("torn down by", world.rank)

@threads
def test_declared_global(world):
    global count
    count += 1
    world.barrier()
    assert count == 1

@threads
def test_containers_and_tensors_of_the_module(world):
    seen["deep"].append(world.rank)
    with torch.no_grad():
        weights.fill_(world.rank)
        net.weight.fill_(world.rank)
    world.barrier()
    assert seen == {"deep": [world.rank]}
    assert weights.tolist() == [world.rank] * 2 and net.weight.item() == world.rank

@threads
def test_a_fixture_set_up_once_is_copied(world, ranks_own, model):
    rank, same = ranks_own
    assert (rank, same) == (world.rank, model)
    with torch.no_grad():
        model.weight.fill_(rank)
    world.barrier()
    assert model.weight[0, 0] == rank

@pytest.fixture
def outer(world, steps):
    world.barrier()
    yield steps.append("outer")
    world.barrier()
    print(world.rank, *steps, "outer down")

@pytest.fixture
def inner(world, outer, steps, request):
    world.barrier()
    yield steps.append("inner")
    world.barrier()
    steps.append("inner down")

@pytest.fixture
def steps(monkeypatch): return []

@threads
def test_fixtures_that_meet(world, inner, steps):
    world.barrier()
    assert steps == ["outer", "inner"]

@threads
def test_output(world, capsys):
    print("hello from", world.rank)
    world.barrier()
    assert capsys.readouterr().out == f"hello from {world.rank}\\n"

@threads
def test_environment(world, monkeypatch):
    monkeypatch.setenv("MINE", str(world.rank))
    world.barrier()
    assert os.environ["MINE"] == os.environ["RANK"] == str(world.rank)

@threads
def test_log(world, caplog):
    logging.getLogger().warning("from %d", world.rank)
    world.barrier()
    assert caplog.messages == [f"from {world.rank}"]
    assert caplog.text.count("from") == 1

@threads
def test_warnings(world):
    warnings.warn(f"seen on {world.rank}")
    with pytest.warns(UserWarning, match=f"mine {world.rank}") as told:
        warnings.warn(f"mine {world.rank}")
        world.barrier()
    assert len(told) == 1

@threads
def test_filters_and_what_shows_warnings(world):
    shown = []
    if world.rank == 0:
        warnings.simplefilter("error")
        warnings.showwarning = lambda *told: shown.append(told)
    with pytest.warns(UserWarning) as told:
        world.barrier()
        warnings.warn(f"within {world.rank}")
    world.barrier()
    if world.rank:
        warnings.warn("not an error here")
    assert (len(told), shown) == (1, [])

@threads
def test_random_numbers(world):
    drawn = world.gather((random.random(), torch.rand(1).item()))
    assert len(set(drawn)) == 1

@threads
def test_properties(world, record_property):
    record_property("from", world.rank)
    world.barrier()

@pytest.fixture
def asked(): return os.environ["RANK"]

@threads
def test_asked_for_by_name(world, request):
    assert request.getfixturevalue("asked") == str(world.rank)
    world.barrier()

@threads
def test_folder(world, tmp_path, request):
    (request.getfixturevalue("tmp_path") / str(world.rank)).write_text("")
    world.barrier()
    assert len(list(tmp_path.iterdir())) == world.size

class TestMethod:
    def setup_method(self): self.mine = []
    @threads
    def test_instance(self, world):
        self.mine.append(world.rank)
        world.barrier()
        assert self.mine == [world.rank]

@pytest.mark.parametrize("values", [[], [0]])
@pytest.mark.world([2, 64], backend="simulated:tree")
def test_parameters(world, values):
    before = len(values)
    values.append(world.rank)
    world.barrier()
    assert len(values) == before + 1 and world.size in (2, 64)

@threads
def test_skipped(world): pytest.skip("everywhere")

@threads
@pytest.mark.xfail(raises=ZeroDivisionError, strict=True)
def test_expected_to_fail(world): 1 / 0

@threads
def test_time_and_sub_groups(world):
    time.sleep(3600 * 24 * (world.size > 9))
    group = dist.new_group([0, 1])
    if world.rank < 2:
        dist.barrier(group)
    dist.destroy_process_group(group)

def test_after_all(): assert (count, seen, weights.sum()) == (0, {"deep": []}, 0)
"""


def test_each_rank_has_for_itself_what_it_has_in_a_process(run: Run) -> None:
    ran = run(HEAD + OWN, "-rA", "-W", "error::distcheck.testing.LeakWarning")
    assert re.search(r"^=+ 20 passed, 1 skipped, 1 xfailed, 4 warnings", ran.stdout, re.M), (
        ran.stdout
    )
    for rank in range(3):
        assert f"torn down by {rank}" in ran.stdout
        assert f"{rank} outer inner inner down outer down" in ran.stdout
        assert f"seen on {rank}" in ran.stdout
        log = rf"Captured log of rank {rank} call -+\nWARNING .* from {rank}\n[-_=]"
        assert re.search(log, ran.stdout), ran.stdout


FAILING = """
@threads
def test_assertion(world):
    print("before it")
    if world.rank == 2:
        assert world.rank == 5
    world.barrier()

@threads
def test_mismatch(world):
    if world.rank == 2:
        dist.all_reduce(torch.zeros(3))
    else:
        dist.barrier()

@threads
def test_deadlock(world):
    dist.recv(torch.zeros(1), (world.rank + 1) % 3)

@threads
def test_not_waited_for(world):
    dist.all_reduce(torch.zeros(3), async_op=True)
    world.barrier()

@threads
def test_subtest(world, subtests):
    with subtests.test("one"): assert world.rank != 1

@threads
def test_forks(world): os.fork()

@threads
def test_leaves(world):
    if world.rank == 1: os._exit(3)
    world.barrier()

@threads
def test_descriptors(world, capfd): pass

@pytest.fixture
def lock():
    import threading
    return threading.Lock()

@threads
def test_a_lock(world, lock): pass
"""


def section(stdout: str, name: str) -> str:
    """What pytest prints of one failure."""
    _, found, rest = stdout.partition(f"_ {name} _")
    assert found, stdout
    return rest.partition("\n____")[0]


def test_a_failure_names_the_rank_and_the_line(run: Run) -> None:
    text = HEAD + FAILING
    ran = run(text, "-p", "no:cacheprovider")
    line = 2 + text[: text.index("assert world.rank == 5")].count("\n")
    told = section(ran.stdout, "test_assertion")
    assert "rank 2 of 3 failed:" in told
    assert f"test_it.py:{line}: in test_assertion" in told
    assert "E   assert 2 == 5" in told
    assert "ranks 0, 1 of 3 lost a peer at" in told
    assert "before it" in told
    told = section(ran.stdout, "test_mismatch")
    assert re.search(
        r"mismatched calls: at call 1, ranks 0, 1 called barrier at \S+test_it.py:\d+ and "
        r"rank 2 called all_reduce\(SUM\) of \[3\] float32 at \S+test_it.py:\d+", told
    ), told  # fmt: skip
    told = section(ran.stdout, "test_deadlock")
    assert "so they wait in a cycle: rank 0 waits for rank 1, rank 1 waits for rank 2" in told
    told = section(ran.stdout, "test_not_waited_for")
    assert "work not waited for: rank" in told
    assert "test_subtest [one] on rank 1 of 3" in ran.stdout
    told = section(ran.stdout, "test_forks")
    assert "it calls os.fork at" in told
    assert told.rstrip().endswith('remove backend="simulated"')
    told = section(ran.stdout, "test_leaves")
    assert "rank 1 of 3 exited" in told
    assert "code 3" in told
    assert re.search(r"test_it.py., line \d+, in test_leaves", told), told
    assert "use capsys" in section(ran.stdout, "test_descriptors")
    assert "the value of lock cannot be copied for each rank" in section(ran.stdout, "test_a_lock")
    assert "FAILED test_it.py::test_deadlock - all 3 ranks: hung (proven deadlock" in ran.stdout


SCHEDULES = """
def ordered(world, source):
    got = []
    for sender in range(1, 3):
        if world.rank == 0:
            message = torch.zeros(1)
            dist.recv(message, source(sender))
            got.append(message.item())
        elif world.rank == sender:
            dist.send(torch.tensor([float(sender)]), 0)
    assert world.rank or got == [1.0, 2.0]

@pytest.mark.world(3, backend="simulated", schedules=12)
def test_from_any(world): ordered(world, lambda sender: None)

@pytest.mark.world(3, backend="simulated", schedules=12)
def test_from_each(world): ordered(world, lambda sender: sender)

@pytest.mark.world(3, backend="simulated", schedule="1:2")
def test_replayed(world): ordered(world, lambda sender: None)

@pytest.mark.world(3, backend="simulated", preemptions=1)
def test_every_switch(world): ordered(world, lambda sender: None)

@pytest.mark.world(8, backend="simulated", schedules=3)
def test_no_schedule_controls_it(world):
    with open("counted", "a") as file: file.write("x")
    assert os.path.getsize("counted") <= 8
"""


def test_schedules_find_what_the_usual_one_hides(run: Run) -> None:
    ran = run(HEAD + SCHEDULES)
    assert re.search(r"^=+ 4 failed, 1 passed in", ran.stdout, re.M), ran.stdout
    told = section(ran.stdout, "test_from_any")
    assert "[2.0, 1.0] == [1.0, 2.0]" in told
    assert "passed under the usual schedule, and failed under schedule 1:2 (found by seed" in told
    assert 'run it again: @pytest.mark.world(3, backend="simulated", schedule="1:2")' in told
    assert "(switched to this rank)" in told
    assert "[2.0, 1.0] == [1.0, 2.0]" in section(ran.stdout, "test_replayed")
    told = section(ran.stdout, "test_every_switch")
    assert "failed under schedule 1:2 (found by schedule 1:2, shrunk in 1 runs)" in told
    told = section(ran.stdout, "test_no_schedule_controls_it")
    assert "run again under the same schedule" in told
