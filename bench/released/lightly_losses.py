"""Losses of lightly with their switch that gathers, as a loss of two views.

Where a loss draws random directions, they are the same in every call: only what is exchanged is
looked at. `gather` and `labels` alone differ from release to release.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from bare import bare
from gathering import Gather


def _of(module: str, name: str, **settings: Any) -> Any:
    return getattr(bare(f"lightly.loss.{module}"), name)(**settings)


class _Drawing(nn.Module):
    """Draws the same numbers in every call."""

    def __init__(self, made: nn.Module) -> None:
        super().__init__()
        self.made = made

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        before = torch.get_rng_state()
        torch.manual_seed(7)
        found: Tensor = self.called(one, two)
        torch.set_rng_state(before)
        return found

    def called(self, one: Tensor, two: Tensor) -> Tensor:
        found: Tensor = self.made(one, two)
        return found


def vicreg() -> nn.Module:
    return _of("vicreg_loss", "VICRegLoss", gather_distributed=True)


def dcl() -> nn.Module:
    return _of("dcl_loss", "DCLLoss", gather_distributed=True)


def dclw() -> nn.Module:
    return _of("dcl_loss", "DCLWLoss", gather_distributed=True)


def ntxent() -> nn.Module:
    return _of("ntx_ent_loss", "NTXentLoss", gather_distributed=True)


class ntxent_of_gathered(nn.Module):
    """Without the switch, given what was gathered before."""

    def __init__(self) -> None:
        super().__init__()
        self.made = _of("ntx_ent_loss", "NTXentLoss")

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        found: Tensor = self.made(*(Gather.apply(view) for view in (one, two)))
        return found


class tico(nn.Module):
    """Its covariance begins anew in every call: here it is no buffer, and no reference has it."""

    def __init__(self) -> None:
        super().__init__()
        self.made = _of("tico_loss", "TiCoLoss", gather_distributed=True)

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        self.made.C = None
        found: Tensor = self.made(one, two)
        return found


class barlow_twins(nn.Module):
    """What is correlated is not normalized here: each rank does that by its own samples, as the
    documentation has it, which is not what is looked at.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made = _of("barlow_twins_loss", "BarlowTwinsLoss", gather_distributed=True)

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        module = bare("lightly.loss.barlow_twins_loss")
        module._normalize = lambda z, *more: (z, *more) if more else z
        found: Tensor = self.made(one, two)
        return found


class swav(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.made = _of("swav_loss", "SwaVLoss", sinkhorn_gather_distributed=True)

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        one, two = (nn.functional.normalize(view, dim=1) for view in (one, two))
        found: Tensor = self.made([one, two], [])
        return found


class dino(nn.Module):
    """The center is a buffer, which all ranks must move alike."""

    def __init__(self) -> None:
        super().__init__()
        self.made = _of("dino_loss", "DINOLoss", output_dim=8, teacher_temp=1.0,
                        warmup_teacher_temp=1.0, student_temp=1.0)  # fmt: skip

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        found: Tensor = self.made([one.detach(), two.detach()], [one, two], epoch=0)
        return found


class ibot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.made = _of("ibot_loss", "IBOTPatchLoss", output_dim=8, teacher_temp=1.0)

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        mask = torch.zeros(len(one), 2, 2, dtype=torch.bool)
        mask[:, 0, 0] = True
        found: Tensor = self.made(one.detach(), two, mask)
        return found


class msn(nn.Module):
    """Without the regularization, which is of a rank's own anchors."""

    name, settings = "MSNLoss", {"regularization_weight": 0.0}

    def __init__(self) -> None:
        super().__init__()
        self.made = _of(f"{self.name[:-4].lower()}_loss", self.name, temperature=1.0,
                        gather_distributed=True, **self.settings)  # fmt: skip
        drawn = torch.randn(5, 8, generator=torch.Generator().manual_seed(3))
        self.prototypes = nn.Parameter(drawn)

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        found: Tensor = self.made(one, two.detach(), self.prototypes)
        return found


class msn_regularised(msn):
    settings = {"regularization_weight": 1.0}


class sigreg(_Drawing):
    def __init__(self) -> None:
        super().__init__(_of("lejepa_loss", "SIGReg", num_vectors=4, gather_distributed=True))

    def called(self, one: Tensor, two: Tensor) -> Tensor:
        found: Tensor = self.made(torch.stack([one, two]))
        return found


class lejepa(_Drawing):
    def __init__(self) -> None:
        super().__init__(_of("lejepa_loss", "LeJEPALoss", gather_distributed=True))

    def called(self, one: Tensor, two: Tensor) -> Tensor:
        views = torch.stack([one, two])
        found: Tensor = self.made(local_proj=views, global_proj=views)
        return found


class visreg(_Drawing):
    def __init__(self) -> None:
        super().__init__(_of("visreg_loss", "VISRegLoss", gather_distributed=True))

    def called(self, one: Tensor, two: Tensor) -> Tensor:
        views = torch.stack([one, two])
        found: Tensor = self.made(local_proj=views, global_proj=views)
        return found


class detcon_s(nn.Module):
    name = "DetConSLoss"

    def __init__(self) -> None:
        super().__init__()
        self.made = _of("detcon_loss", self.name, temperature=1.0, gather_distributed=True)

    def views(self, one: Tensor, two: Tensor) -> list[Tensor]:
        return [one.view(-1, 2, 4), two.view(-1, 2, 4)]

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        masks = torch.tensor([[0, 1]]).expand(len(one), 2)
        found: Tensor = self.made(*self.views(one, two), masks, masks)
        return found


class detcon_b(detcon_s):
    name = "DetConBLoss"

    def views(self, one: Tensor, two: Tensor) -> list[Tensor]:
        both = [one.view(-1, 2, 4), two.view(-1, 2, 4)]
        return [*both, *both]


class vicregl(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.made = _of("vicregl_loss", "VICRegLLoss", num_matches=(1, 1), gather_distributed=True)

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        grid = torch.zeros(len(one), 1, 1, 2)
        maps = [view.view(-1, 1, 1, 8) for view in (one, two)]
        found: Tensor = self.made(
            global_view_features=[(one, maps[0]), (two, maps[1])],
            global_view_grids=[grid, grid],
        )
        return found.sum()


class vicregl_global(vicregl):
    """The global part alone, which is the one that gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.made.alpha = 1.0


def directclr() -> nn.Module:
    return _of("directclr_loss", "DirectCLRLoss", loss_dim=4, gather_distributed=True)
