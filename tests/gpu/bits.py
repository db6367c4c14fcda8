"""Which operations give other bits when they run again, on a device; and what TensorFloat-32 costs.

    python tests/gpu/bits.py DEVICE [BATCH]       prints JSON

VGG11 takes a step five times from one state, with and without deterministic algorithms: the outputs
of its layers and its gradients are compared by their bits. Operations that are known for their
atomic additions run five times, too. Each setting of TensorFloat-32 has its distance from float64.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from distcheck.workloads.vgg11 import VGG11

TIMES = 5
Tensors = dict[str, torch.Tensor]


def one_step(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Tensors:
    """The outputs of all layers, then gradients in the order in which backward makes them."""
    found: Tensors = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, given: Any, output: torch.Tensor) -> None:
            found[f"forward of {name} ({type(module).__name__})"] = output.detach().clone()

        return hook

    leaves = [(n, m) for n, m in model.named_modules() if not list(m.children())]
    handles = [module.register_forward_hook(keep(name)) for name, module in leaves]
    model.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    for handle in handles:
        handle.remove()
    for name, parameter in reversed(list(model.named_parameters())):
        assert parameter.grad is not None
        found[f"gradient of {name}"] = parameter.grad.clone()
    return found


def differing(one: Tensors, other: Tensors) -> list[str]:
    """The names of what has other bits."""
    return [name for name in one if not torch.equal(one[name], other[name])]


def vgg11_twice(device: str, batch: int, *, deterministic: bool) -> dict[str, Any]:
    """What differs between steps from one state."""
    torch.use_deterministic_algorithms(deterministic)
    try:
        torch.manual_seed(0)
        model = VGG11(10).to(device)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        images = torch.randn(batch, 3, 32, 32).to(device)
        labels = torch.randint(0, 10, (batch,)).to(device)
        steps = []
        for _ in range(TIMES):
            model.load_state_dict(state)
            steps.append(one_step(model, images, labels))
        found = [name for other in steps[1:] for name in differing(steps[0], other)]
        return {"compared": len(steps[0]), "times": TIMES, "differ": list(dict.fromkeys(found))}
    except RuntimeError as error:
        return {"refused": str(error).partition("\n")[0]}
    finally:
        torch.use_deterministic_algorithms(False)


def operations(device: str) -> dict[str, Callable[[], torch.Tensor]]:
    """Each is called several times, with the same numbers."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    index = torch.randint(0, 50, (100_000,), generator=generator).to(device)
    values, table = drawn(100_000), drawn(50, 64)
    images, weight = drawn(64, 32, 33, 33), drawn(48, 32, 3, 3)
    one, other = drawn(64, 20_000), drawn(20_000, 64)
    labels = torch.randint(0, 50, (4096,), generator=generator).to(device)

    def backward(function: Callable[[torch.Tensor], torch.Tensor], leaf: torch.Tensor) -> Any:
        leaf = leaf.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(function(leaf).square().sum(), [leaf])
        return gradient

    def resized(mode: str) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda leaf: F.interpolate(leaf, scale_factor=2.3, mode=mode)

    return {
        "index_add_": lambda: torch.zeros(50, device=device).index_add_(0, index, values),
        "scatter_add_": lambda: torch.zeros(50, device=device).scatter_add_(0, index, values),
        "index_put_(accumulate)": lambda: torch.zeros(50, device=device).index_put_(
            (index,), values, accumulate=True
        ),
        "bincount(weights)": lambda: torch.bincount(index, weights=values),
        "embedding, backward": lambda: backward(lambda t: F.embedding(index, t), table),
        "gather, backward": lambda: backward(lambda t: t[:, :1].repeat(1, 9)[index], table),
        "conv2d, backward of weight": lambda: backward(lambda w: F.conv2d(images, w), weight),
        "conv2d, backward of input": lambda: backward(lambda x: F.conv2d(x, weight), images),
        "max_pool2d, backward": lambda: backward(lambda x: F.max_pool2d(x, 3, 1), images),
        "adaptive_avg_pool2d, backward": lambda: backward(
            lambda x: F.adaptive_avg_pool2d(x, 7), images
        ),
        "interpolate(bilinear), backward": lambda: backward(resized("bilinear"), images),
        "interpolate(nearest), backward": lambda: backward(resized("nearest"), images),
        "cross_entropy, backward": lambda: backward(
            lambda x: F.cross_entropy(x, labels), one.view(-1)[: 4096 * 50].view(4096, 50)
        ),
        "matmul, 20,000 terms": lambda: one @ other,
        "sum": lambda: values.sum(),
        "cumsum": lambda: values.cumsum(0),
    }


def unlike_themselves(device: str) -> dict[str, str]:
    """Per operation: "same bits", "other bits", or why it could not run."""
    found = {}
    for name, operation in operations(device).items():
        try:
            first, *others = [operation() for _ in range(TIMES)]
            same = all(torch.equal(first, one) for one in others)
            found[name] = "same bits" if same else "other bits"
        except RuntimeError as error:
            found[name] = str(error).partition("\n")[0]
    return found


def precisions(device: str, batch: int) -> dict[str, float]:
    """Per setting: how far VGG11's gradients are from those in float64, over their norm."""
    torch.manual_seed(0)
    model = VGG11(10).to(device)
    images = torch.randn(batch, 3, 32, 32).to(device)
    labels = torch.randint(0, 10, (batch,)).to(device)
    state = {name: value.clone() for name, value in model.state_dict().items()}

    def gradients(dtype: torch.dtype) -> torch.Tensor:
        model.load_state_dict(state)
        found = one_step(model.to(dtype), images.to(dtype), labels)
        model.float()
        return torch.cat([g.double().flatten() for n, g in found.items() if n[0] == "g"])

    exact, found = gradients(torch.float64), {}
    backends: Any = torch.backends
    for name, convolutions, products in (
        ("float32", "ieee", "ieee"), ("TF32 in convolutions", "tf32", "ieee"),
        ("TF32 in products", "ieee", "tf32"), ("TF32 in both", "tf32", "tf32"),
    ):  # fmt: skip
        backends.cudnn.conv.fp32_precision = convolutions
        backends.cuda.matmul.fp32_precision = products
        gap = gradients(torch.float32) - exact
        found[name] = float(gap.norm() / exact.norm())
    return found


def main(device: str, batch: int) -> None:
    """Prints everything as JSON."""
    if device == "cuda" and not torch.cuda.is_available():
        print("this machine has no NVIDIA GPU that torch can use", file=sys.stderr)
        sys.exit(3)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic products
    document = {
        "torch": str(torch.__version__),
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "vgg11": vgg11_twice(device, batch, deterministic=False),
        "vgg11, deterministic algorithms": vgg11_twice(device, batch, deterministic=True),
        "operations": unlike_themselves(device),
        "distance from float64": precisions(device, batch),
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 256)
