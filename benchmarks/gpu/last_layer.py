"""The last layer of a language model with its loss and gradients, alone on one GPU.

GPT-2's by default: 32 x 1024 tokens, 768 features, 50304 classes, bfloat16 with a float32 table.
Modes:

  torch                    PyTorch, compiled, the logits whole
  jax                      hidden @ table.T and Optax's loss
  linnet                   hidden @ table.T and softmax_cross_entropy
  linnet/chunked[=N]       chunked_softmax_cross_entropy of N tokens at a time, then .mean()
      /mean                with reduction="mean"
      /each                with weights outside, so that the logits are made again
      /float32             with the chunk's logits in float32

The floor is three products, and hidden states and table read once and their gradients written.
"""

from typing import Any

import harness
import training
from harness import Workload

MODES = [
    "torch",
    "jax",
    "linnet",
    "linnet/chunked=1024",
    "linnet/chunked=2048",
    "linnet/chunked=4096",
    "linnet/chunked=8192",
    "linnet/chunked=4096/mean",
    "linnet/chunked=4096/float32",
    "linnet/chunked=4096/each",
]


def build(mode: str, args: Any) -> list[Workload]:
    shape = (128, 32, 256) if args.quick else (args.tokens, args.features, args.classes)
    tokens, features, classes = shape
    package, options = training.parse(mode)
    parts = torch_step(*shape) if package == "torch" else jax_step(package, options, *shape)
    moved = 2 * (2 * tokens * features + 4 * classes * features)
    flops = 6 * tokens * features * classes
    return [Workload(**parts, flops=flops, moved=moved, items=tokens)]


def jax_step(package: str, options: dict[str, Any], tokens: int, features: int, classes: int):
    """The loss and its gradients by one of the ways."""
    import jax
    import jax.numpy as jnp

    from linnet.functional import losses

    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (tokens, features), jnp.bfloat16)
    table = jax.random.normal(keys[1], (classes, features)) * 0.02
    labels = jax.random.randint(keys[2], (tokens,), 0, classes)
    weights = jnp.linspace(0.5, 1.5, tokens) if "each" in options else None
    size = options.get("chunked")

    def loss(hidden, table):
        table = table.astype(jnp.bfloat16)
        if package == "jax":
            return training.optax_loss(hidden @ table.T, labels)
        if size is None:
            return losses.softmax_cross_entropy(hidden @ table.T, labels).mean()
        out = losses.chunked_softmax_cross_entropy(
            hidden,
            table,
            labels,
            chunk_size=None if size is True else int(size),
            transposed=True,
            reduction="mean" if "mean" in options else None,
            logits_dtype=jnp.float32 if "float32" in options else None,
        )
        return out.mean() if weights is None else (out * weights).mean()

    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    return {
        "run": lambda _: step(hidden, table)[0],
        "lower": lambda: step.lower(hidden, table),
        **harness.jax_clock(),
    }


def torch_step(tokens: int, features: int, classes: int):
    """The same in PyTorch."""
    import torch
    import torch.nn.functional as F

    device, compiled = harness.torch_device_and_compile()
    hidden = torch.randn(tokens, features, device=device, dtype=torch.bfloat16, requires_grad=True)
    table = (torch.randn(classes, features, device=device) * 0.02).requires_grad_()
    labels = torch.randint(0, classes, (tokens,), device=device)

    def loss_of(hidden, table):
        return F.cross_entropy((hidden @ table.bfloat16().T).float(), labels)

    loss_of = compiled(loss_of)

    def run(_):
        hidden.grad = table.grad = None
        loss = loss_of(hidden, table)
        loss.backward()
        return loss.detach()

    return {"run": run, **harness.torch_clock()}


def arguments(doc: str | None, modes: list[str]) -> Any:
    parser = harness.parser(doc, modes)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--features", type=int, default=768)
    parser.add_argument("--classes", type=int, default=50304)
    return parser


if __name__ == "__main__":
    harness.main(__file__, arguments(__doc__, MODES).parse_args(), build)
