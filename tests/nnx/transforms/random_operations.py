"""What a random program does inside the jitted function: a table of small operations.

An operation gets a ``Scope``, a number that says where, and a number that says what. It finds its
target by position, so that it does the same to any objects of one structure; where there is none it
does nothing. What it returns to the caller goes to ``scope.out``.
"""

import zlib
from collections import UserDict

import jax
import jax.numpy as jnp
import numpy as np

from linnet import nnx
from linnet.errors import StateMismatchError
from tests.compare import is_key
from tests.nnx.object_graphs import ArraySettings, Box, Config, Pair
from tests.nnx.transforms.random_worlds import (
    NAMES,
    Node,
    Quantized,
    account,
    array,
    change_a_table,
    holders,
    identities,
    is_array,
    is_data_tuple,
    is_member,
    is_notebook_function,
    node,
    nodes,
    one_of,
    places,
    plus,
    stored,
    swap_places,
    variables,
)

SEEN: dict[
    int, str
] = {}  # what functions saw of their arguments, by the number they returned for it


class Scope:
    """The arguments of one run.

    Args:
      arguments: a pytree of objects, as given.
      x: a number, traced under ``nnx.jit``.
      plain: spell out by hand what the transforms of Linnet mean.
    """

    def __init__(self, arguments, x, plain):
        self.roots = list(objects_in(arguments))
        self.x = x
        self.plain = plain
        self.out = []

    def look(self):
        """All that can be seen: a number for the structure, and the arrays."""
        arrays = []
        roots = {str(i): root for i, root in enumerate(self.roots)}
        found = account(
            roots, look=False, arrays=lambda x: arrays.append(jnp.asarray(x)) or kind_text(x)
        )
        text = "\n".join(f"{path}: {entry}" for path, entry in found.items())
        number = zlib.crc32(text.encode())
        SEEN[number] = text
        return jnp.asarray(number, jnp.uint32), arrays


def kind_text(x):
    return f"{x.dtype}{list(x.shape)}"


def objects_in(arguments):
    """The objects in a pytree of arguments, in the order that JAX has for it."""
    if isinstance(arguments, dict):
        arguments = [arguments[key] for key in sorted(arguments)]
    if isinstance(arguments, (list, tuple)):
        for item in arguments:
            yield from objects_in(item)
    elif is_member(arguments):
        yield arguments


def program_function(steps, plain):
    """The function that performs some steps, in a form to be jitted or to be run as it is.

    It returns what it saw when it began, and what its operations returned.
    """

    def run(*args, x, **kwargs):
        scope = Scope((args, kwargs), x, plain)
        seen = scope.look()
        for name, where, n in steps:
            OPERATIONS[name](scope, where, n)
        return seen, scope.out

    return run


OPERATIONS = {}
NEEDS: dict[str, tuple[str, ...]] = {}  # ingredients without which an operation finds no target
CALM: set[str] = set()  # operations that change values alone, after which a plan still holds


def operation(*needs, calm=False):
    def register(function):
        name = function.__name__
        OPERATIONS[name], NEEDS[name] = function, needs
        CALM.update({name} if calm else ())
        return function

    return register


# ---- values -------------------------------------------------------------------------------------


@operation(calm=True)
def read(scope, where, n):
    for variable in one_of(variables(scope.roots), where):
        for leaf in jax.tree.leaves(variable.value):
            scope.out.append(plus(leaf, n))


@operation("jax array", calm=True)
def read_an_array(scope, where, n):
    for place in one_of(places(scope.roots, is_array), where):
        scope.out.append(plus(place.get(), n))


@operation("param", calm=True)
def write(scope, where, n):
    for variable in one_of(variables(scope.roots), where):
        variable.value = jax.tree.map(lambda x: plus(x, n), variable.value)


@operation("count", calm=True)
def write_in_place(scope, where, n):
    plain = [v for v in variables(scope.roots) if is_array(v.value) and not is_key(v.value)]
    for variable in one_of(plain, where):
        variable[...] += jnp.asarray(n, variable.dtype)


@operation("param", calm=True)
def write_the_input(scope, where, n):
    floats = [v for v in variables(scope.roots) if is_array(v.value) and v.dtype == jnp.float32]
    for variable in one_of(floats, where):
        variable.value = variable.value + scope.x


@operation("count", calm=True)
def write_what_a_setting_says(scope, where, n):
    """What is traced depends on a setting of JAX that the cache key of a compiled function has."""
    n = n if jax.config.jax_default_matmul_precision is None else n + 20
    write_in_place(scope, where, n)


def is_ref(variable):
    """Whether shape and dtype of a Variable are fixed, because it is stored as a ref."""
    return variable.ref or variable.hijax


def reshapable(roots):
    """The Variables that can get an array of another shape."""
    return [v for v in variables(roots) if is_array(v.value) and not is_ref(v)]


@operation("param", calm=True)
def write_another_shape(scope, where, n):
    for variable in one_of(reshapable(scope.roots), where):
        variable.value = array(n, 2 + n % 2)


@operation("jax array")
def write_an_array(scope, where, n):
    for place in one_of(places(scope.roots, is_array), where):
        place.set(plus(place.get(), n))


@operation("numpy array")
def write_two_arrays(scope, where, n):
    write_an_array(scope, where, n)
    write_an_array(scope, where + 1, n + 1)


def with_dicts(roots):
    return [v for v in variables(roots) if isinstance(v.raw_value, dict)]


@operation("dict in a Variable", calm=True)
def write_an_item(scope, where, n):
    for variable in one_of(with_dicts(scope.roots), where):
        for key in one_of(sorted(variable.value), n):
            variable.value[key] = plus(variable.value[key], n)


@operation("dict in a Variable", calm=True)
def write_an_item_of_the_raw_value(scope, where, n):
    for variable in one_of(with_dicts(scope.roots), where):
        for key in one_of(sorted(variable.raw_value), n):
            variable.raw_value[key] = plus(variable.raw_value[key], n)


@operation("dict in a Variable")
def add_an_item_to_a_value(scope, where, n):
    for variable in one_of(with_dicts(scope.roots), where):
        variable.value[f"new{n % 3}"] = array(n)


@operation("list in a Variable")
def write_an_element_of_a_value(scope, where, n):
    found = [v for v in variables(scope.roots) if isinstance(v.raw_value, list)]
    for variable in one_of(found, where):
        variable.value[0] = plus(variable.value[0], n)


# ---- structure ----------------------------------------------------------------------------------


@operation("number")
def set_a_static_value(scope, where, n):
    for place in one_of(places(scope.roots, lambda x: type(x) is int), where):
        place.set(place.get() % 7 + n)


@operation("numbers")
def grow_a_static_list(scope, where, n):
    def is_static_list(x):
        return type(x) is list and all(type(item) is int for item in x)

    for place in one_of(places(scope.roots, is_static_list), where):
        if len(place.get()) < 4:
            place.get().append(n)


@operation("config")
def write_into_a_static_object(scope, where, n):
    for place in one_of(places(scope.roots, lambda x: type(x) is Config), where):
        place.get().width = place.get().width % 7 + n


@operation("settings", "user dict")
def write_into_a_static_array(scope, where, n):
    for place in one_of(places(scope.roots, lambda x: type(x) in (ArraySettings, UserDict)), where):
        change_a_table(place.get(), n)


@operation()
def set_an_attribute(scope, where, n):
    made = [lambda: n, lambda: nnx.Param(array(n)), lambda: array(n), lambda: node(n), lambda: None]
    for holder in one_of(nodes(scope.roots), where):
        setattr(holder, NAMES[n % 8], made[n % len(made)]())


@operation("child")
def delete_an_attribute(scope, where, n):
    deletable = [p for p in places(scope.roots) if isinstance(p.holder, Node)]
    for place in one_of(deletable, where):
        place.delete()


@operation("list")
def append_to_a_list(scope, where, n):
    lists = [x for x in holders(scope.roots) if isinstance(x, (list, nnx.List))]
    for found in one_of(lists, where):
        found.append(node(n) if n % 2 else nnx.Param(array(n)))


@operation("list", "List")
def shorten_a_list(scope, where, n):
    lists = [x for x in holders(scope.roots) if isinstance(x, (list, nnx.List)) and len(x)]
    for found in one_of(lists, where):
        found.pop(n % len(found))


@operation("dict", "Dict")
def set_an_entry(scope, where, n):
    dicts = [x for x in holders(scope.roots) if isinstance(x, (dict, nnx.Dict))]
    for found in one_of(dicts, where):
        found["new" if n % 2 else "q"] = nnx.Param(array(n))


@operation("child", "child")
def swap(scope, where, n):
    swap_places(places(scope.roots, is_member), where, n)


@operation("jax array", "numpy array")
def swap_arrays(scope, where, n):
    swap_places(places(scope.roots, is_array), where, n)


@operation("child")
def share(scope, where, n):
    for place in one_of(places(scope.roots, is_member), where):
        for holder in one_of(nodes(scope.roots), n):
            setattr(holder, NAMES[n % 8], place.get())


@operation("tuple", "named tuple")
def replace_a_tuple(scope, where, n):
    for place in one_of(places(scope.roots, is_data_tuple), where):
        old = place.get()
        kept = list(old) if n % 2 else [*old[:-1], node(n)]
        turned = kept[::-1] if n % 3 else kept
        place.set(Pair(*turned) if isinstance(old, Pair) else tuple(turned))


@operation("box")
def write_into_a_box(scope, where, n):
    for place in one_of(places(scope.roots, lambda x: isinstance(x, Box)), where):
        place.get().content = nnx.Param(array(n))


@operation("count")
def set_metadata(scope, where, n):
    for variable in one_of(variables(scope.roots), where):
        variable.set_metadata(role=n)


def switches(roots):
    return [x for x in nodes(roots) if hasattr(x, "deterministic")]


@operation("switch")
def train_or_evaluate(scope, where, n):
    for found in one_of(switches(scope.roots), where):
        found.train() if found.deterministic else found.eval()


@operation("child")
def change_the_class(scope, where, n):
    for found in one_of([x for x in nodes(scope.roots) if type(x) in (Node, Quantized)], where):
        found.__class__ = Quantized if type(found) is Node else Node


# ---- calls and results --------------------------------------------------------------------------


@operation("function", calm=True)
def call_a_function(scope, where, n):
    for place in one_of(places(scope.roots, is_notebook_function), where):
        scope.out.append(jnp.asarray(place.get()(scope.x)))


@operation("child", calm=True)
def call_a_method(scope, where, n):
    for found in one_of(nodes(scope.roots), where):
        scope.out.append(found.double(scope.x) + found.rule())


@operation()
def return_an_object(scope, where, n):
    members = [x for x in identities(scope.roots, look=False) if is_member(x)]
    scope.out += one_of(members, where)


@operation()
def return_a_new_object(scope, where, n):
    new = node(n)
    for found in one_of(nodes(scope.roots), where):
        new.old = found
    scope.out.append(new)


# ---- random numbers and optimizers --------------------------------------------------------------


def streams(roots):
    found = [x for x in roots if isinstance(x, (nnx.Rngs, nnx.RngStream))]
    standing = places(roots, lambda x: isinstance(x, (nnx.Rngs, nnx.RngStream)))
    return found + [place.get() for place in standing]


@operation("unused Rngs", calm=True)
def draw(scope, where, n):
    for stream in one_of(streams(scope.roots), where):
        scope.out.append(jax.random.key_data(stream()))


@operation("unused Rngs", calm=True)
def draw_from_each(scope, where, n):
    for stream in streams(scope.roots)[:3]:
        scope.out.append(jax.random.key_data(stream()))


@operation("unused Rngs", calm=True)
def draw_noise(scope, where, n):
    for rngs in one_of([x for x in streams(scope.roots) if isinstance(x, nnx.Rngs)], where):
        if "noise" in rngs:
            scope.out.append(jax.random.key_data(rngs.noise()))
            scope.out.append(rngs.noise.count.value)


@operation("unused Rngs")
def keep_a_stream(scope, where, n):
    for rngs in one_of([x for x in streams(scope.roots) if isinstance(x, nnx.Rngs)], where):
        for holder in one_of(nodes(scope.roots), n):
            if "default" in rngs:
                holder.kept = rngs.default


def optimizers(roots):
    """Optimizers beside the model that they are for."""
    standing = places(roots, lambda x: isinstance(x, nnx.Optimizer))
    pairs = [(place.get(), getattr(place.holder, "trained", None)) for place in standing]
    return [(optimizer, model) for optimizer, model in pairs if isinstance(model, nnx.Module)]


@operation("injected rate", calm=True)
def update_with_an_injected_rate(scope, where, n):
    update_an_optimizer(scope, where, n)


@operation("adam", calm=True)
def update_an_optimizer(scope, where, n):
    for optimizer, model in one_of(optimizers(scope.roots), where):
        state = nnx.state(model, nnx.Param)
        grads = jax.tree.map(lambda x: jnp.full(x.shape, n, x.dtype), state)
        try:
            optimizer.update(model, grads)
        except StateMismatchError:  # something was frozen since
            scope.out.append(scope.x + n)


# ---- other transforms inside --------------------------------------------------------------------


def step(found, x, n):
    """Adds to every Variable below an object and sums them up."""
    total = x
    for variable in variables([found]):
        variable.value = jax.tree.map(lambda leaf: plus(leaf, n), variable.value)
        total = total + sum_of(variable)
    return total


def sum_of(variable):
    arrays = [x for x in jax.tree.leaves(variable.value) if not is_key(x)]
    return sum([jnp.sum(x).astype(jnp.float32) for x in arrays], jnp.float32(0))


@operation("child", calm=True)
def run_remat(scope, where, n):
    for found in one_of(nodes(scope.roots), where):
        lifted = step if scope.plain else nnx.remat(step, static_argnums=2)
        scope.out.append(lifted(found, scope.x, n))


@operation("child", calm=True)
def run_cond(scope, where, n):
    def leave(found, x):
        return x

    def move(found, x):
        return step(found, x, n)

    for found in one_of(nodes(scope.roots), where):
        if scope.plain:
            result = move(found, scope.x) if scope.x > 1 else leave(found, scope.x)
        else:
            result = nnx.cond(scope.x > 1, move, leave, found, scope.x)
        scope.out.append(result)


@operation("child", calm=True)
def run_scan(scope, where, n):
    def body(found, x):
        return found, step(found, x, n)

    xs = jnp.arange(2.0)
    for found in one_of(nodes(scope.roots), where):
        if scope.plain:
            scope.out.append(jnp.stack([body(found, x)[1] for x in xs]))
        else:
            axes = (nnx.Carry, 0)
            scope.out.append(nnx.scan(body, in_axes=axes, out_axes=axes)(found, xs)[1])


def can_be_mapped(found):
    """Whether everything below has a first axis of size two."""
    things = identities([found], look=False)
    leaves = [leaf for v in things if isinstance(v, nnx.Variable) for leaf in arrays_of(v)]
    leaves += [place.get() for place in places([found], is_array)]
    sealed = any(isinstance(x, (nnx.Rngs, nnx.RngStream, nnx.Optimizer)) for x in things)
    return bool(leaves) and not sealed and all(x.shape[:1] == (2,) for x in leaves)


def arrays_of(variable):
    return jax.tree.leaves(stored(variable))


@operation("child", calm=True)
def run_vmap(scope, where, n):
    for found in one_of([x for x in nodes(scope.roots) if can_be_mapped(x)], where):
        if scope.plain:
            step(found, scope.x, n)
            leaves = jax.tree.leaves([variable.value for variable in variables([found])])
            sums = [sum(jnp.sum(leaf[i]).astype(jnp.float32) for leaf in leaves) for i in (0, 1)]
            scope.out.append(scope.x + jnp.stack(sums))
        else:
            mapped = nnx.vmap(lambda found, x: step(found, x, n), in_axes=(0, None), out_axes=0)
            scope.out.append(mapped(found, scope.x))


def trainable(found):
    """The parameters below, if all of them have gradients."""
    params = [v for v in identities([found], look=False) if isinstance(v, nnx.Param)]
    fits = all(not is_ref(v) and x.dtype == jnp.float32 for v in params for x in arrays_of(v))
    return [v for v in params if not v.get_metadata("frozen", False)] if fits else []


@operation("child", calm=True)
def run_grad(scope, where, n):
    def loss(found, x):
        params = [jnp.sum(leaf * leaf) for v in trainable(found) for leaf in arrays_of(v)]
        value = sum(params, x)
        for variable in variables([found]):
            if not isinstance(variable, nnx.Param):
                variable.value = jax.tree.map(lambda leaf: plus(leaf, n), variable.value)
        return value

    for found in one_of([x for x in nodes(scope.roots) if trainable(x)], where):
        if scope.plain:
            squares = [jnp.sum(2 * leaf) for v in trainable(found) for leaf in arrays_of(v)]
            value = loss(found, scope.x)
        else:
            value, grads = nnx.value_and_grad(loss)(found, scope.x)
            squares = [jnp.sum(leaf) for leaf in jax.tree.leaves(grads)]
        scope.out.append((value, sum(squares)))


def seen_text(number):
    return SEEN.get(int(np.asarray(number)), "").splitlines()
