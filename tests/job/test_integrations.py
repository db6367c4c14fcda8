"""Guards in the Trainer, Lightning and accelerate: right steps agree, a planted change is found."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from distcheck import integrations
from distcheck.errors import CannotRunError, UsageError
from tests.launchers.processes import free_port
from tests.optional import needs_package

# Rank 1 changes a parameter after step 5; checks are made after steps 2, 4 and 8.
PROGRAM = """
import json, os, sys, tempfile
import torch
from distcheck import integrations
from distcheck.job.guard.guarding import DivergenceError

checks = []
settings = {"every": 4, "on_check": checks.append, "save": None}
generator = torch.Generator().manual_seed(3)
data = [
    {"x": torch.randn(6, generator=generator), "labels": torch.tensor(n % 3)} for n in range(96)
]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(6, 3)

    def forward(self, x, labels=None):
        logits = self.net(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def change(model, step):
    if step == 5 and int(os.environ["RANK"]) == 1:
        with torch.no_grad():
            next(model.parameters()).add_(0.5)


def loader():
    return torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)


def trainer():
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Plant(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **_):
            change(model, state.global_step)

    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(dir="."), use_cpu=True, per_device_train_batch_size=4,
        max_steps=9, save_strategy="no", report_to=[], disable_tqdm=True, logging_strategy="no",
    )
    Trainer(Net(), arguments, train_dataset=data,
            callbacks=[integrations.TrainerGuard(**settings), Plant()]).train()


def lightning():
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.inner = Net()

        def training_step(self, batch, index):
            change(self.inner, self.global_step)
            return self.inner(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 1e-2)

    lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=9, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[integrations.LightningGuard(**settings)],
    ).fit(Module(), loader())


def accelerate():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net = Net()
    net, optimizer, batches = accelerator.prepare(net, torch.optim.Adam(net.parameters()), loader())
    (guard,) = integrations.guard_accelerator(accelerator, **settings)
    for step, batch in zip(range(1, 10), batches):
        accelerator.backward(net(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
        change(net, step)
    guard.finish()


end = "finished"
try:
    globals()[sys.argv[1]]()
except DivergenceError as error:
    end = str(error)
if os.environ["RANK"] == "0":
    with open("said.json", "w") as file:
        json.dump({"end": end, "checks": checks}, file)
sys.stdout.flush()
os._exit(0)  # the frameworks' own endings wait for each other
"""


@pytest.mark.parametrize(
    "framework",
    [
        pytest.param("trainer", marks=needs_package("transformers")),
        pytest.param("lightning", marks=needs_package("lightning")),
        pytest.param("accelerate", marks=needs_package("accelerate")),
    ],
)
def test_a_changed_replica_is_found_and_right_steps_agree(framework: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    words = ["--nproc-per-node", "2", "--master-port", str(free_port()), "program.py", framework]
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words], cwd=tmp_path,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert (tmp_path / "said.json").exists(), ran.stdout + ran.stderr
    said = json.loads((tmp_path / "said.json").read_text())
    assert [(one["step"], one["agrees"]) for one in said["checks"]] == [
        (2, True), (4, True), (8, False),
    ]  # fmt: skip
    assert all(one["tensors"] > 2 for one in said["checks"])  # optimizer state, too
    last = said["checks"][-1]
    assert last["causes"] == ["parameters-modified-outside-step"]
    assert "net.weight differs between rank 0 and rank 1" in last["text"]
    assert said["end"] == f"distcheck.guard: {last['text']}"


@pytest.mark.parametrize(
    ("name", "package", "sentence"),
    [
        ("TrainerGuard", "transformers", "the Hugging Face Trainer is not installed; run pip "
         "install transformers"),
        ("LightningGuard", "lightning", "Lightning is not installed; run pip install lightning"),
    ],
)  # fmt: skip
def test_a_framework_that_is_not_installed_is_named(
    name: str, package: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (package, "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, module, None)  # its import raises ModuleNotFoundError
    create: Any = integrations._CLASSES[name]
    with pytest.raises(CannotRunError) as caught:
        create.__wrapped__()
    assert str(caught.value) == sentence


def test_importing_it_imports_no_framework() -> None:
    program = (
        "import sys, distcheck.integrations as i\n"
        "assert dir(i) == ['LightningGuard', 'TrainerGuard', 'guard_accelerator']\n"
        "assert not {'torch', 'transformers', 'lightning', 'accelerate'} & {*sys.modules}\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    with pytest.raises(AttributeError):
        _ = integrations.Nothing


class Prepared:
    """What guard_accelerator reads of an accelerator."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self._optimizers = [*optimizers]


def test_bad_settings_and_an_unprepared_accelerator_are_named() -> None:
    with pytest.raises(UsageError, match=r"^the accelerator has no optimizer; call "):
        integrations.guard_accelerator(Prepared())
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], 0.1)
    with pytest.raises(UsageError, match=r"'evry'; distcheck.guard describes the arguments$"):
        integrations.guard_accelerator(Prepared(optimizer), evry=2)
    with pytest.raises(UsageError, match="on_check must be a function, not 7"):
        integrations.guard_accelerator(Prepared(optimizer), on_check=7)
