"""A training step of GPT-2 on one GPU: time, memory, and the time until the first step is done.

AdamW, bfloat16 with float32 parameters, causal attention. Modes, each in a process of its own:

  torch                PyTorch, compiled; torch/remat: with its blocks computed again
  jax                  JAX by hand, with Optax's loss; jax/chunked=N: that loss in N remade pieces
  flax, linnet         the same program text on both, with Optax's loss
  linnet/OPTIONS       options, parted by /:
      whole            linnet's softmax_cross_entropy instead of Optax's
      chunked[=N]      chunked_softmax_cross_entropy, N tokens at a time
      mean             the mean is taken by that function, not of the losses it returns
      float32          with the chunk's logits in float32
      donate           the step's arguments are donated
      remat            blocks are computed again in the backward pass; remat=dots: but not products
      stack            blocks are in an nnx.Stack
      unroll           the stack is compiled as one block after the other, without a loop
      masters          parameters in bfloat16, their masters in float32, by a precision policy
  torch/masters        the same in PyTorch, by hand: it has no such optimizer

The floors are the products of the model at the rate of one large product, and parameters and
moments read and written at the rate of one large copy.
"""

import dataclasses
import functools
import importlib
from typing import Any

import gpt
import harness
from harness import Workload

MODES = [
    "torch",
    "jax",
    "linnet/donate",
    "linnet/whole/donate",
    "linnet/chunked/donate",
    "linnet/chunked/remat=dots/donate",
    "linnet/chunked/stack/remat=dots/donate",
]


def parse(mode: str) -> tuple[str, dict[str, Any]]:
    """A mode's library and its options."""
    package, *options = mode.split("/")
    pairs = (option.partition("=") for option in options)
    return package, {name: value or True for name, _, value in pairs}


def config_of(args: Any) -> gpt.Config:
    config = gpt.QUICK if args.quick else gpt.CONFIGS[args.config]
    return dataclasses.replace(config, batch=args.batch) if args.batch else config


def build(mode: str, args: Any) -> list[Workload]:
    package, options = parse(mode)
    config = config_of(args)
    make = {"torch": torch_step, "jax": jax_step}.get(package)
    parts = make(config, options) if make else nnx_step(package, config, options)
    least = {"flops": config.step_flops(), "moved": config.step_bytes(), "items": config.tokens}
    return [Workload(**parts, **least)]


def batches(config: gpt.Config) -> Any:
    import numpy as np

    shape = (4, config.batch, config.length + 1)
    return np.random.default_rng(0).integers(0, config.vocab, shape).astype(np.int32)


def optax_loss(logits: Any, labels: Any) -> Any:
    import jax.numpy as jnp
    import optax

    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def nnx_step(package: str, config: gpt.Config, options: dict[str, Any]) -> dict[str, Any]:
    """A step with NNX as a user writes it."""
    import jax
    import jax.numpy as jnp
    import optax

    nnx = importlib.import_module(f"{package}.nnx")
    remat = options.get("remat", False)
    if remat == "dots":
        remat = jax.checkpoint_policies.dots_saveable
    model = gpt.nnx_model(
        package, config, stack="stack" in options, unroll="unroll" in options, remat=remat
    )
    if "masters" in options:
        nnx.set_precision(model, "params=bfloat16,masters=float32")
    optimizer = nnx.Optimizer(model, optax.adamw(3e-4), wrt=nnx.Param)
    places = jnp.arange(config.length)
    data = jnp.asarray(batches(config))

    def loss_of(model, words, labels):
        if "chunked" in options:
            from linnet.functional.losses import chunked_softmax_cross_entropy

            size = None if options["chunked"] is True else int(options["chunked"])
            return chunked_softmax_cross_entropy(
                model.hidden(words, places),
                model.words.embedding[...].astype(jnp.bfloat16),
                labels,
                chunk_size=size,
                transposed=True,
                logits_dtype=jnp.float32 if "float32" in options else None,
                reduction="mean" if "mean" in options else None,
            ).mean()
        logits = model(words, places)
        if "whole" in options:
            from linnet.functional.losses import softmax_cross_entropy

            return softmax_cross_entropy(logits, labels).mean()
        return optax_loss(logits, labels)

    @functools.partial(nnx.jit, **({"donate_argnums": (0, 1)} if "donate" in options else {}))
    def train(model, optimizer, text):
        loss, grads = nnx.value_and_grad(loss_of)(model, text[:, :-1], text[:, 1:])
        optimizer.update(model, grads)
        return loss

    return {
        "run": lambda i: train(model, optimizer, data[i % len(data)]),
        "lower": lambda: train.lower(model, optimizer, data[0]),
        **harness.jax_clock(),
    }


def jax_step(config: gpt.Config, options: dict[str, Any]) -> dict[str, Any]:
    """A step over nested dicts."""
    import jax
    import jax.numpy as jnp
    import optax

    transformation = optax.adamw(3e-4)
    data = jnp.asarray(batches(config))

    def loss_of(parameters, words, labels):
        hidden = gpt.jax_hidden(config, parameters, words)
        table = parameters["words"].astype(jnp.bfloat16)
        if "chunked" not in options:
            return optax_loss(hidden @ table.T, labels)
        pieces = int(options["chunked"])
        hidden = hidden.reshape(pieces, -1, config.width)
        piece = jax.checkpoint(lambda x: optax_loss(x[0] @ table.T, x[1]))
        return jax.lax.map(piece, (hidden, labels.reshape(pieces, -1))).mean()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train(parameters, moments, text):
        loss, grads = jax.value_and_grad(loss_of)(parameters, text[:, :-1], text[:, 1:])
        updates, moments = transformation.update(grads, moments, parameters)
        return optax.apply_updates(parameters, updates), moments, loss

    parameters = gpt.jax_parameters(config)
    state = [parameters, jax.jit(transformation.init)(parameters)]

    def run(i):
        *state[:], loss = train(*state, data[i % len(data)])
        return loss

    lower = functools.partial(train.lower, *state, data[0])
    return {"run": run, "lower": lower, **harness.jax_clock()}


def torch_step(config: gpt.Config, options: dict[str, Any]) -> dict[str, Any]:
    """A compiled step of PyTorch."""
    import torch

    device, compiled = harness.torch_device_and_compile()
    model = gpt.torch_model(config, device, remat="remat" in options)
    if "masters" in options:
        model.bfloat16()
    params = list(model.parameters())
    masters = [p.detach().float() for p in params] if "masters" in options else params
    optimizer = torch.optim.AdamW(masters, lr=3e-4, weight_decay=1e-4, fused=True)
    model = compiled(model)
    data = torch.as_tensor(batches(config), device=device).long()

    def run(i):
        text = data[i % len(data)]
        with torch.autocast(device, torch.bfloat16):
            loss = model(text[:, :-1], text[:, 1:])
        model.zero_grad(set_to_none=True)
        loss.backward()
        if "masters" in options:
            for master, param in zip(masters, params, strict=True):
                master.grad = param.grad.float()
        optimizer.step()
        if "masters" in options:
            with torch.no_grad():
                torch._foreach_copy_(params, masters)
        return loss.detach()

    return {"run": run, **harness.torch_clock()}


def arguments(doc: str | None, modes: list[str]) -> Any:
    parser = harness.parser(doc, modes)
    parser.add_argument("--config", choices=[*gpt.CONFIGS], default="124M")
    parser.add_argument("--batch", type=int, help="sequences of 1024 tokens in a batch")
    return parser


if __name__ == "__main__":
    harness.main(__file__, arguments(__doc__, MODES).parse_args(), build)
