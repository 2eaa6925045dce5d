"""Programs over how models print: tabulate and view_info. What they show is compared, not how."""

import re

import jax
import jax.numpy as jnp

from tests.against_flax.compare import program, same_on_both

PROGRAMS = {}
X = jnp.ones((2, 3))


def counting(nnx, depth=3):
    """A model that counts how often each of its parts is called."""
    calls = []

    class Part(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(3, 3, rngs=rngs)

        def __call__(self, x):
            calls.append("part")
            return self.linear(x)

    class Foo(nnx.Module):
        def __init__(self, rngs):
            self.parts = nnx.List([Part(rngs) for _ in range(depth)])
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            calls.append("foo")
            for part in self.parts:
                x = part(x)
            return self.drop(x)

    return Foo(nnx.Rngs(0)), calls


def table_of(nnx, model, *args, **options):
    text = nnx.tabulate(model, *args, console_kwargs={"width": 300}, **options)
    return re.sub(r"\x1b\[[\d;]*m", "", text)  # without colours


def title_of(text):
    return next(line for line in text.splitlines() if "Summary" in line).strip()


def sums(text):
    """How much all Variables hold, and those of each kind."""
    last = next(x for x in text.splitlines() if re.match(r"│.*\btotal\b", x, re.IGNORECASE))
    whole = re.search(r"Total Parameters: (.*\))", text).group(1)
    return whole, sorted(re.findall(r"\d+ \(\d+ B\)", last))


@program(PROGRAMS)
def a_title(f):
    return title_of(table_of(f.nnx, counting(f.nnx)[0], X))


@program(PROGRAMS)
def titles_of_layers(f):
    layers = [f.nnx.Linear(3, 2, rngs=f.nnx.Rngs(0)), f.nnx.Sequential(jnp.sin)]
    return [title_of(table_of(f.nnx, layer, X)) for layer in layers]


@program(PROGRAMS)
def each_part_is_called_once(f):
    model, calls = counting(f.nnx, 9)
    table_of(f.nnx, model, X)
    return calls


@program(PROGRAMS)
def each_part_is_called_once_also_for_its_operations(f):
    model, calls = counting(f.nnx)
    table_of(f.nnx, model, X, compute_flops=True)
    return sorted(set(calls))


@program(PROGRAMS)
def the_model_is_left_as_it_was(f):
    model, _ = counting(f.nnx)
    before = f.nnx.state(model)
    table_of(f.nnx, model, X)
    return jax.tree.leaves(f.nnx.to_pure_dict(f.nnx.state(model, f.nnx.Param))), before


@program(PROGRAMS)
def classes_and_sizes_are_there(f):
    text = table_of(f.nnx, counting(f.nnx)[0], X)
    words = ("Foo", "Part", "Linear", "Dropout", "kernel:", "bias:", "parts", "12 (48 B)")
    return [word in text for word in words]


@program(PROGRAMS)
def totals(f):
    return sums(table_of(f.nnx, counting(f.nnx)[0], X))


@program(PROGRAMS)
def a_shared_part_counts_once(f):
    nnx = f.nnx

    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.one = self.two = nnx.Linear(3, 3, rngs=rngs)

        def __call__(self, x):
            return self.two(self.one(x))

    return sums(table_of(nnx, Tied(nnx.Rngs(0)), X))


@program(PROGRAMS)
def inputs_that_are_none_or_empty(f):
    nnx = f.nnx

    class Odd(nnx.Module):
        def __call__(self, x, mask, extra):
            return {"x": x, "nothing": None, "empty": []}

    text = table_of(nnx, Odd(), X, None, {})
    return "None" in text, "Odd" in text


@program(PROGRAMS)
def only_the_first_rows(f):
    nnx = f.nnx

    class Outer(nnx.Module):
        def __init__(self):
            self.inner = nnx.LoRA(
                3, 2, 3, base_module=nnx.Linear(3, 3, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1)
            )

        def __call__(self, x):
            return self.inner(x)

    texts = [table_of(nnx, Outer(), X, depth=depth) for depth in (0, 1, 2)]
    return [[word in text for word in ("Outer", "LoRA ", "Linear")] for text in texts]


@program(PROGRAMS)
def another_method(f):
    nnx = f.nnx

    class Coder(nnx.Module):
        def __init__(self, rngs):
            self.down, self.up = nnx.Linear(3, 2, rngs=rngs), nnx.Linear(2, 3, rngs=rngs)

        def encode(self, x):
            return self.down(x)

    return title_of(table_of(nnx, Coder(nnx.Rngs(0)), X, method="encode"))


# ---- view_info ----------------------------------------------------------------------------------


@program(PROGRAMS)
def view_info_names_the_classes_that_take_arguments(f):
    nnx = f.nnx
    model = nnx.Sequential(nnx.Dropout(0.5, rngs=nnx.Rngs(0)), nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
    text = nnx.view_info(model)
    names = ("Dropout", "BatchNorm", "deterministic", "use_running_average", "Linear")
    return [name in text for name in names]


@program(PROGRAMS)
def view_info_of_one_kind(f):
    nnx = f.nnx
    model = nnx.Sequential(nnx.Dropout(0.5, rngs=nnx.Rngs(0)), nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
    text = nnx.view_info(model, only=nnx.Dropout)
    return ["deterministic" in text, "use_running_average" in text]


@program(PROGRAMS)
def view_info_of_a_class_of_ones_own(f):
    nnx = f.nnx

    class Scaled(nnx.Module):
        def __init__(self):
            self.scale = 1.0

        def set_view(self, scale: float | None = None, **kwargs):
            """Sets the view.

            Args:
              scale: what the input is multiplied by,
                in every call.
            """
            if scale is not None:
                self.scale = scale
            return kwargs

        def __call__(self, x):
            return x * self.scale

    model = Scaled()
    text = nnx.view_info(model)
    shown = [part in text for part in ("Scaled", "scale", "multiplied by", "in every call")]
    return shown, nnx.view(model, scale=3.0)(X)


@program(PROGRAMS)
def view_info_of_nothing(f):
    return f.nnx.view_info(f.nnx.Linear(3, 3, rngs=f.nnx.Rngs(0)))


test_programs = same_on_both(PROGRAMS)
