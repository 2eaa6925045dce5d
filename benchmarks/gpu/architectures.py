"""Training steps of other architectures on one GPU: ResNet-50, ViT-B/16 and an LSTM.

bfloat16 with float32 parameters, images channels last, 224 x 224, 1000 classes; the LSTM has 1024
units and runs over 256 steps. Modes: LIBRARY/NAME, of torch (compiled), flax, linnet and resnet50,
vit, lstm; the same program text on Flax and Linnet.

The floors are the products of the layers, and parameters and moments read and written.
"""

import dataclasses
import functools
import importlib
from typing import Any

import harness
from harness import Workload

NAMES = ["resnet50", "vit", "lstm"]
MODES = [f"{package}/{name}" for name in NAMES for package in ("torch", "linnet")]


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The sizes of all three, so that a quick run can have small ones."""

    images: int = 256
    side: int = 224
    classes: int = 1000
    stages: tuple[int, ...] = (3, 4, 6, 3)
    channels: int = 64
    patch: int = 16
    vit_layers: int = 12
    vit_width: int = 768
    vit_heads: int = 12
    sequences: int = 128
    time: int = 256
    units: int = 1024


QUICK = Shapes(4, 32, 10, (1, 1), 8, 8, 1, 32, 2, 4, 8, 16)


def build(mode: str, args: Any) -> list[Workload]:
    s = QUICK if args.quick else Shapes()
    package, _, name = mode.partition("/")
    parts, parameters = torch_step(name, s) if package == "torch" else nnx_step(package, name, s)
    moments = 1 if name == "resnet50" else 2
    flops = 6 * multiplications(name, s)
    items = s.sequences if name == "lstm" else s.images
    return [Workload(**parts, flops=flops, moved=8 * (1 + moments) * parameters, items=items)]


def multiplications(name: str, s: Shapes) -> float:
    """Of one forward pass over the batch, in the products."""
    if name == "lstm":
        return s.sequences * s.time * 8 * s.units**2
    if name == "vit":
        tokens = (s.side // s.patch) ** 2
        blocks = s.vit_layers * (12 * s.vit_width**2 + 2 * tokens * s.vit_width)
        ends = 3 * s.patch**2 * s.vit_width + s.vit_width * s.classes / tokens
        return s.images * tokens * (blocks + ends)
    side, into = s.side // 2, s.channels
    total = side**2 * 7 * 7 * 3 * into
    side //= 2
    for stage, depth in enumerate(s.stages):
        inner, out = s.channels * 2**stage, 4 * s.channels * 2**stage
        for layer in range(depth):
            small = side // 2 if stage and not layer else side
            total += side**2 * into * inner + small**2 * (9 * inner**2 + inner * out)
            total += small**2 * into * out if not layer else 0
            side, into = small, out
    return s.images * (total + into * s.classes)


def inputs(name: str, s: Shapes) -> tuple[Any, Any]:
    import numpy as np

    random = np.random.default_rng(0)
    if name == "lstm":
        return random.normal(size=(s.sequences, s.time, s.units)).astype(np.float32), None
    images = random.normal(size=(s.images, s.side, s.side, 3)).astype(np.float32)
    return images, random.integers(0, s.classes, s.images).astype(np.int32)


# NNX.


def nnx_resnet(nnx: Any, s: Shapes) -> Any:
    import jax.numpy as jnp

    conv = functools.partial(nnx.Conv, use_bias=False, dtype=jnp.bfloat16)
    norm = functools.partial(nnx.BatchNorm, momentum=0.9, dtype=jnp.bfloat16)
    by_one = ((1, 1), (1, 1))

    class Bottleneck(nnx.Module):
        def __init__(self, into, inner, stride, *, rngs):
            out = 4 * inner
            self.conv1 = conv(into, inner, (1, 1), rngs=rngs)
            self.conv2 = conv(inner, inner, (3, 3), stride, padding=by_one, rngs=rngs)
            self.conv3 = conv(inner, out, (1, 1), rngs=rngs)
            self.norm1, self.norm2 = norm(inner, rngs=rngs), norm(inner, rngs=rngs)
            self.norm3 = norm(out, rngs=rngs)
            wider = stride != 1 or into != out
            self.short = conv(into, out, (1, 1), stride, rngs=rngs) if wider else None
            self.short_norm = norm(out, rngs=rngs) if wider else None

        def __call__(self, x):
            y = nnx.relu(self.norm1(self.conv1(x)))
            y = nnx.relu(self.norm2(self.conv2(y)))
            y = self.norm3(self.conv3(y))
            if self.short is not None:
                x = self.short_norm(self.short(x))
            return nnx.relu(x + y)

    class ResNet(nnx.Module):
        def __init__(self, *, rngs):
            padding = ((3, 3), (3, 3))
            self.stem = conv(3, s.channels, (7, 7), 2, padding=padding, rngs=rngs)
            self.norm = norm(s.channels, rngs=rngs)
            blocks, into = [], s.channels
            for stage, depth in enumerate(s.stages):
                inner = s.channels * 2**stage
                for layer in range(depth):
                    stride = 2 if stage and not layer else 1
                    blocks.append(Bottleneck(into, inner, stride, rngs=rngs))
                    into = 4 * inner
            self.blocks = nnx.List(blocks)
            self.head = nnx.Linear(into, s.classes, dtype=jnp.bfloat16, rngs=rngs)

        def __call__(self, x):
            x = nnx.relu(self.norm(self.stem(x)))
            x = nnx.max_pool(x, (3, 3), (2, 2), padding=by_one)
            for block in self.blocks:
                x = block(x)
            return self.head(x.mean((1, 2)))

    return ResNet(rngs=nnx.Rngs(0))


def nnx_vit(nnx: Any, s: Shapes) -> Any:
    import jax.numpy as jnp

    width = s.vit_width
    options = {"dtype": jnp.bfloat16, "param_dtype": jnp.float32}

    class Block(nnx.Module):
        def __init__(self, *, rngs):
            self.norm1 = nnx.LayerNorm(width, rngs=rngs, **options)
            self.attention = nnx.MultiHeadAttention(
                s.vit_heads, width, decode=False, rngs=rngs, **options
            )
            self.norm2 = nnx.LayerNorm(width, rngs=rngs, **options)
            self.up = nnx.Linear(width, 4 * width, rngs=rngs, **options)
            self.down = nnx.Linear(4 * width, width, rngs=rngs, **options)

        def __call__(self, x):
            x = x + self.attention(self.norm1(x))
            return x + self.down(nnx.gelu(self.up(self.norm2(x))))

    class ViT(nnx.Module):
        def __init__(self, *, rngs):
            size = (s.patch, s.patch)
            self.patches = nnx.Conv(3, width, size, size, padding="VALID", rngs=rngs, **options)
            tokens = (s.side // s.patch) ** 2
            self.places = nnx.Embed(tokens, width, rngs=rngs, **options)
            self.blocks = nnx.List([Block(rngs=rngs) for _ in range(s.vit_layers)])
            self.norm = nnx.LayerNorm(width, rngs=rngs, **options)
            self.head = nnx.Linear(width, s.classes, rngs=rngs, **options)

        def __call__(self, x):
            x = self.patches(x).reshape(x.shape[0], -1, width)
            x = x + self.places(jnp.arange(x.shape[1]))[None]
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x).mean(1))

    return ViT(rngs=nnx.Rngs(0))


def nnx_lstm(nnx: Any, s: Shapes) -> Any:
    import jax.numpy as jnp

    rngs = nnx.Rngs(0)
    cell = nnx.OptimizedLSTMCell(s.units, s.units, dtype=jnp.bfloat16, rngs=rngs)
    return nnx.RNN(cell)


def nnx_step(package: str, name: str, s: Shapes) -> tuple[dict[str, Any], int]:
    """A step as a user writes it, and the number of parameters."""
    import jax
    import jax.numpy as jnp
    import optax

    nnx = importlib.import_module(f"{package}.nnx")
    make = {"resnet50": nnx_resnet, "vit": nnx_vit, "lstm": nnx_lstm}[name]
    model = make(nnx, s)
    transformation = optax.sgd(0.1, momentum=0.9) if name == "resnet50" else optax.adamw(3e-4)
    optimizer = nnx.Optimizer(model, transformation, wrt=nnx.Param)
    x, labels = inputs(name, s)
    x, labels = jnp.asarray(x, jnp.bfloat16), None if labels is None else jnp.asarray(labels)

    def loss_of(model, x, labels):
        out = model(x).astype(jnp.float32)
        if labels is None:
            return (out**2).mean()
        return optax.softmax_cross_entropy_with_integer_labels(out, labels).mean()

    @functools.partial(nnx.jit, donate_argnums=(0, 1))
    def train(model, optimizer, x, labels):
        loss, grads = nnx.value_and_grad(loss_of)(model, x, labels)
        optimizer.update(model, grads)
        return loss

    parameters = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    parts = {
        "run": lambda _: train(model, optimizer, x, labels),
        "lower": lambda: train.lower(model, optimizer, x, labels),
        **harness.jax_clock(),
    }
    return parts, parameters


# PyTorch.


def torch_resnet(s: Shapes) -> Any:
    import torch.nn.functional as F
    from torch import nn

    conv = functools.partial(nn.Conv2d, bias=False)

    class Bottleneck(nn.Module):
        def __init__(self, into, inner, stride):
            super().__init__()
            out = 4 * inner
            self.conv1, self.norm1 = conv(into, inner, 1), nn.BatchNorm2d(inner)
            self.conv2 = conv(inner, inner, 3, stride, padding=1)
            self.norm2 = nn.BatchNorm2d(inner)
            self.conv3, self.norm3 = conv(inner, out, 1), nn.BatchNorm2d(out)
            self.short = None
            if stride != 1 or into != out:
                self.short = nn.Sequential(conv(into, out, 1, stride), nn.BatchNorm2d(out))

        def forward(self, x):
            y = F.relu(self.norm1(self.conv1(x)))
            y = F.relu(self.norm2(self.conv2(y)))
            y = self.norm3(self.conv3(y))
            return F.relu(y + (x if self.short is None else self.short(x)))

    blocks, into = [], s.channels
    for stage, depth in enumerate(s.stages):
        inner = s.channels * 2**stage
        for layer in range(depth):
            blocks.append(Bottleneck(into, inner, 2 if stage and not layer else 1))
            into = 4 * inner
    stem = conv(3, s.channels, 7, 2, padding=3)
    return nn.Sequential(
        stem,
        nn.BatchNorm2d(s.channels),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, padding=1),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(into, s.classes),
    )


def torch_vit(s: Shapes) -> Any:
    import torch
    import torch.nn.functional as F
    from torch import nn

    width, heads = s.vit_width, s.vit_heads

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            batch, length, _ = x.shape
            qkv = self.qkv(self.norm1(x)).view(batch, length, 3, heads, width // heads)
            mixed = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4))
            x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
            return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))

    class ViT(nn.Module):
        def __init__(self):
            super().__init__()
            self.patches = nn.Conv2d(3, width, s.patch, s.patch)
            self.places = nn.Parameter(torch.randn((s.side // s.patch) ** 2, width) * 0.02)
            self.blocks = nn.Sequential(*(Block() for _ in range(s.vit_layers)))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, s.classes)

        def forward(self, x):
            x = self.patches(x).flatten(2).transpose(1, 2) + self.places
            return self.head(self.norm(self.blocks(x)).mean(1))

    return ViT()


def torch_step(name: str, s: Shapes) -> tuple[dict[str, Any], int]:
    """The same step in PyTorch."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    device, compiled = harness.torch_device_and_compile()
    if name == "lstm":
        model = nn.LSTM(s.units, s.units, batch_first=True).to(device)
    else:
        model = (torch_resnet(s) if name == "resnet50" else torch_vit(s)).to(
            device, memory_format=torch.channels_last
        )
    parameters = sum(p.numel() for p in model.parameters())
    if name == "resnet50":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=1e-4, fused=True)
    forward = compiled(model)
    x, labels = inputs(name, s)
    x = torch.as_tensor(x, device=device, dtype=torch.bfloat16)
    if labels is not None:
        x = x.permute(0, 3, 1, 2)  # channels last in memory, as NNX has them
        labels = torch.as_tensor(labels, device=device).long()

    def run(_):
        with torch.autocast(device, torch.bfloat16):
            out = forward(x)
            if labels is None:
                loss = (out[0].float() ** 2).mean()
            else:
                loss = F.cross_entropy(out.float(), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return {"run": run, **harness.torch_clock()}, parameters


arguments = harness.parser


if __name__ == "__main__":
    harness.main(__file__, arguments(__doc__, MODES).parse_args(), build)
