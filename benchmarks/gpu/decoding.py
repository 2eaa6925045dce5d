"""Greedy decoding with GPT-2 on one GPU, with a key/value cache: the time for a number of tokens.

bfloat16 throughout, a prompt of one token, a cache of 1024. Modes: torch (compiled, CUDA graphs),
flax, linnet, and jax: the step of Linnet's model by hand, with `jax.jit` over lists of arrays;
jax/packed: with the small arrays that it only reads packed into one. A host loop calls a compiled
step for each token; a device loop is one compiled call, for JAX only: `nnx.generate` of Linnet, a
`lax.scan` over the step for Flax.

The floor is the parameters and the filled part of the cache read once for each token.
"""

import dataclasses
import functools
import importlib
from collections.abc import Iterator
from typing import Any

import gpt
import harness
from harness import Workload

MODES = ["torch", "jax", "jax/packed", "linnet"]
SMALL = 1 << 16  # bytes of an array that is packed


def build(mode: str, args: Any) -> Iterator[Workload]:
    config = gpt.QUICK if args.quick else gpt.CONFIGS[args.config]
    tokens = 8 if args.quick else args.tokens
    for batch in [2] if args.quick else args.batches:
        sized = dataclasses.replace(config, batch=batch)
        by_hand = {"jax": jax_loops, "jax/packed": functools.partial(jax_loops, packed=True)}
        make = {"torch": torch_loops, **by_hand}.get(mode)
        loops = make(sized, tokens) if make else nnx_loops(mode, sized, tokens)
        for name, parts in loops.items():
            named = f"{name}, batch {batch}, {tokens} tokens"
            yield Workload(**parts, **least(sized, tokens), name=named)


def least(config: gpt.Config, tokens: int) -> dict[str, Any]:
    kept = config.layers * 2 * config.width  # of a token in the cache
    products = 12 * config.layers * config.width**2 + config.vocab * config.width
    return {
        "flops": tokens * config.batch * (2 * products + 2 * tokens / 2 * kept),
        "moved": tokens * 2 * (config.parameters + config.batch * tokens / 2 * kept),
        "items": tokens * config.batch,
    }


def nnx_inputs(package: str, config: gpt.Config, tokens: int) -> tuple[Any, Any, list[Any]]:
    """A model with an empty cache, the first words, and the places of all tokens."""
    import jax.numpy as jnp

    model = gpt.nnx_model(package, config, decode=True, param_dtype=jnp.bfloat16)
    for block in model.blocks:
        shape = (config.batch, config.length, config.width)
        block.attention.init_cache(shape, dtype=jnp.bfloat16)
    first = jnp.zeros((config.batch, 1), jnp.int32)
    return model, first, [jnp.asarray([place]) for place in range(tokens)]


def next_words(model: Any, words: Any, place: Any) -> Any:
    import jax.numpy as jnp

    return jnp.argmax(model(words, place), axis=-1).astype(jnp.int32)


def jax_loops(config: gpt.Config, tokens: int, packed: bool = False) -> Any:
    """The host loop by hand, over two lists of arrays, of which the cache is donated."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from linnet import nnx

    model, first, places = nnx_inputs("linnet", config, tokens)
    graphdef, cache, rest = nnx.split(model, nnx.Cache, ...)
    kept, kept_tree = jax.tree.flatten(rest)
    written, written_tree = jax.tree.flatten(cache)

    shapes = [x.shape for x in kept if packed and x.nbytes < SMALL]
    if packed:
        small = jnp.concatenate([x.ravel() for x in kept if x.nbytes < SMALL])
        is_small = [x.nbytes < SMALL for x in kept]
        kept = [small, *(x for x in kept if x.nbytes >= SMALL)]

    def unpack(kept):
        ends = np.cumsum([0, *map(np.prod, shapes)]).tolist()
        parts = (
            kept[0][start:end].reshape(shape)
            for start, end, shape in zip(ends, ends[1:], shapes, strict=False)
        )
        others = iter(kept[1:])
        return [next(parts if small else others) for small in is_small]

    def step_of_arrays(written, kept, words, place):
        kept = unpack(kept) if packed else kept
        cache, rest = written_tree.unflatten(written), kept_tree.unflatten(kept)
        model = nnx.merge(graphdef, cache, rest)
        words = next_words(model, words, place)
        return words, jax.tree.leaves(nnx.state(model, nnx.Cache))

    step = jax.jit(step_of_arrays, donate_argnums=0)

    def run(_):
        nonlocal written
        written = [x if x.ndim else jnp.zeros((), jnp.int32) for x in written]
        words = first
        for place in places:
            words, written = step(written, kept, words, place)
        return words

    lower = functools.partial(step.lower, written, kept, first, places[0])
    return {"host loop": {"run": run, "lower": lower, **harness.jax_clock()}}


def nnx_loops(package: str, config: gpt.Config, tokens: int) -> dict[str, Any]:
    """Both loops over a model of NNX."""
    import jax
    import jax.numpy as jnp

    nnx = importlib.import_module(f"{package}.nnx")
    model, first, places = nnx_inputs(package, config, tokens)
    step = nnx.jit(next_words)

    def rewind():
        for block in model.blocks:
            block.attention.cache_index[...] = jnp.zeros((), jnp.int32)

    def host_loop(_):
        rewind()
        words = first
        for place in places:
            words = step(model, words, place)
        return words

    @nnx.jit
    def scan(model, words):
        graphdef, state = nnx.split(model)

        def body(carry, place):
            state, words = carry
            model = nnx.merge(graphdef, state)
            words = next_words(model, words, place[None])
            return (nnx.state(model), words), None

        (state, words), _ = jax.lax.scan(body, (state, words), jnp.arange(tokens))
        nnx.update(model, state)
        return words

    def device_loop(_):
        rewind()
        return scan(model, first)

    def call(model, words, positions):
        return model(words, positions[0])

    def generate(_):
        return nnx.generate(model, first, tokens, cache_length=config.length, call=call)

    clock = harness.jax_clock()
    lower = functools.partial(step.lower, model, first, places[0])
    loops = {"host loop": {"run": host_loop, "lower": lower, **clock}}
    if package == "linnet":
        return loops | {"generate": {"run": generate, **clock}}
    return loops | {"device loop": {"run": device_loop, **clock}}


def torch_loops(config: gpt.Config, tokens: int) -> dict[str, Any]:
    """The host loop of PyTorch."""
    import torch

    device, compiled = harness.torch_device_and_compile()
    model = gpt.torch_model(config, device, decode=True).bfloat16().eval()
    places = [torch.tensor([place], device=device) for place in range(tokens)]
    step = compiled(model, mode="reduce-overhead", fullgraph=True)

    def run(_):
        words = torch.zeros(config.batch, 1, dtype=torch.long, device=device)
        with torch.no_grad():
            for place in places:
                torch.compiler.cudagraph_mark_step_begin()
                words = step(words, place).clone()
        return words

    return {"host loop": {"run": run, **harness.torch_clock()}}


def arguments(doc: str | None, modes: list[str]) -> Any:
    parser = harness.parser(doc, modes)
    parser.add_argument("--config", choices=[*gpt.CONFIGS], default="124M")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, default=256)
    parser.set_defaults(steps=1)
    return parser


if __name__ == "__main__":
    harness.main(__file__, arguments(__doc__, MODES).parse_args(), build)
