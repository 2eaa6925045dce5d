"""What happens to objects between two calls of a jitted function: a table of changes.

Each change belongs to a group, so that a run can be restricted to some of them, and names the
ingredients without which it finds no target. None of them keeps alive what it replaces: the next
object may get its address.
"""

import copy
import pickle
from collections import UserDict
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from linnet import nnx
from tests.nnx.object_graphs import ArraySettings, Box, Config, HashedOptions, user_dict
from tests.nnx.transforms.random_operations import optimizers, reshapable, switches, with_dicts
from tests.nnx.transforms.random_worlds import (
    NAMES,
    Node,
    Place,
    Quantized,
    Trained,
    Wayward,
    Wilful,
    act,
    array,
    cell,
    change_a_table,
    helper,
    holders,
    is_array,
    is_data_tuple,
    is_member,
    is_notebook_function,
    node,
    nodes,
    notebook,
    one_of,
    other_helper,
    places,
    plus,
    stored,
    swap_places,
    variables,
)


class Change(NamedTuple):
    make: object
    group: str
    needs: tuple[str, ...]


CHANGES: dict[str, Change] = {}


def change(group, *needs):
    def register(function):
        CHANGES[function.__name__] = Change(function, group, needs)
        return function

    return register


@change("nothing")
def nothing(world, where, n):
    pass


# ---- values -------------------------------------------------------------------------------------


@change("values", "param")
def set_a_value(world, where, n):
    for variable in one_of(variables(world.all()), where):
        variable.value = jax.tree.map(lambda x: plus(x, n), variable.value)


@change("values", "param")
def set_another_shape(world, where, n):
    for variable in one_of(reshapable(world.all()), where):
        variable.value = array(n, 1 + n % 3)


@change("values", "param")
def set_another_dtype(world, where, n):
    for variable in one_of(reshapable(world.all()), where):
        variable.value = jnp.arange(2, dtype=(jnp.int32, jnp.uint32, jnp.float32)[n % 3])


@change("values", "statistic")
def set_a_numpy_value(world, where, n):
    for variable in one_of(reshapable(world.all()), where):
        variable.set_raw_value(np.float32([n, n]))


def is_jax_ref(x):
    return isinstance(x, jax.Ref)


@change("values", "jax array", "child")
def set_an_array(world, where, n):
    for place in one_of(places(world.all(), lambda x: is_array(x) and not is_jax_ref(x)), where):
        place.set(plus(place.get(), n))


@change("values", "jax array")
def set_an_array_of_another_kind(world, where, n):
    made = (array(n, 3), np.float32([n, n]), jnp.arange(2), np.arange(2, dtype=np.int32))
    for place in one_of(places(world.all(), is_array), where):
        place.set(made[n % 4])


@change("values", "numpy array")
def write_into_a_numpy_array(world, where, n):
    for place in one_of(places(world.all(), lambda x: isinstance(x, np.ndarray)), where):
        if place.get().flags.writeable:
            place.get()[0] = n + 10


@change("pytree values", "dict in a Variable")
def set_an_item_of_a_value(world, where, n):
    for variable in one_of(with_dicts(world.all()), where):
        for key in one_of(sorted(variable.value), n):
            variable.value[key] = plus(variable.value[key], n)


@change("pytree values", "dict in a Variable")
def add_or_drop_an_item_of_a_value(world, where, n):
    for variable in one_of(with_dicts(world.all()), where):
        if n % 2:
            variable.raw_value[f"new{n % 3}"] = array(n)
        elif len(variable.raw_value) > 1:
            del variable.raw_value[min(variable.raw_value)]


@change("pytree values", "dict in a Variable")
def set_a_whole_pytree_value(world, where, n):
    for variable in one_of(with_dicts(world.all()), where):
        variable.value = {"k": array(n), f"m{n % 2}": jnp.int32(n)}


# ---- attributes and sub-objects -----------------------------------------------------------------


@change("attributes", "param", "jax array")
def exchange_array_and_variable(world, where, n):
    for place in one_of(places(world.all(), lambda x: is_array(x) or is_member(x)), where):
        place.set(array(n) if not is_array(place.get()) else nnx.Param(array(n)))


@change("attributes", "number", "jax array")
def exchange_array_and_number(world, where, n):
    for place in one_of(places(world.all(), lambda x: is_array(x) or type(x) is int), where):
        place.set(n if is_array(place.get()) else array(n))


@change("attributes")
def add_an_attribute(world, where, n):
    made = [lambda: nnx.Param(array(n)), lambda: array(n), lambda: node(n), lambda: n, lambda: [n]]
    for holder in one_of(nodes(world.all()), where):
        setattr(holder, NAMES[n % 8], made[n % len(made)]())


@change("attributes", "child")
def delete_an_attribute(world, where, n):
    found = [p for p in places(world.all()) if isinstance(p.holder, Node)]
    for place in one_of(found, where):
        place.delete()


@change("sub-objects", "child")
def replace_an_object_at_once(world, where, n):
    for place in one_of(places(world.all(), lambda x: isinstance(x, Node)), where):
        place.set(node(n))


@change("sub-objects", "child")
def drop_an_object_then_make_one(world, where, n):
    found = [
        p for p in places(world.all(), lambda x: isinstance(x, Node)) if isinstance(p.holder, Node)
    ]
    for place in one_of(found, where):
        place.replace(lambda: node(n))


@change("sub-objects", "param")
def drop_a_variable_then_make_one(world, where, n):
    for place in one_of(places(world.all(), lambda x: isinstance(x, nnx.Variable)), where):
        place.replace(lambda: nnx.Param(array(n)))


@change("sub-objects", "child", "child")
def swap_two_objects(world, where, n):
    swap_places(places(world.all(), is_member), where, n)


@change("sub-objects", "jax array", "jax array")
def swap_two_arrays(world, where, n):
    swap_places(places(world.all(), is_array), where, n)


@change("sharing", "child")
def share_an_object(world, where, n):
    for place in one_of(places(world.all(), is_member), where):
        for holder in one_of(nodes(world.all()), n):
            setattr(holder, NAMES[n % 8], place.get())


@change("sharing", "shared", "child")
def unshare_an_object(world, where, n):
    for place in one_of(places(world.all(), lambda x: isinstance(x, (Node, nnx.Variable))), where):
        place.set(copy.deepcopy(place.get()))


@change("sharing", "child")
def share_between_roots(world, where, n):
    for found in one_of(nodes([world.roots["left"]]), where):
        world.roots["right"].guest = found


@change("classes", "child")
def set_the_class(world, where, n):
    for found in one_of([x for x in nodes(world.all()) if type(x) in (Node, Quantized)], where):
        found.__class__ = Quantized if type(found) is Node else Node


@change("classes", "param")
def set_the_class_of_a_variable(world, where, n):
    plain = [v for v in variables(world.all()) if type(v) in (nnx.Param, nnx.BatchStat)]
    for variable in one_of(plain, where):
        variable.__class__ = nnx.BatchStat if type(variable) is nnx.Param else nnx.Param


@change("classes", "param")
def replace_a_variable_by_another_kind(world, where, n):
    kind = (nnx.BatchStat, nnx.Cache, nnx.Param)[n % 3]
    for place in one_of(places(world.all(), lambda x: isinstance(x, nnx.Variable)), where):
        place.set(kind(stored(place.get())))


# ---- containers ---------------------------------------------------------------------------------


def lists(world):
    return [x for x in holders(world.all()) if isinstance(x, (list, nnx.List)) and len(x)]


@change("lists and dicts", "list", "List")
def replace_an_element(world, where, n):
    for found in one_of(lists(world), where):
        place = Place(found, n % len(found))
        place.replace(lambda: node(n) if n % 2 else nnx.Param(array(n)))


@change("lists and dicts", "list", "List", "list of arrays")
def grow_or_shorten_a_list(world, where, n):
    for found in one_of(lists(world), where):
        if n % 2:
            found.append(node(n) if n % 3 else array(n))
        else:
            found.pop()


@change("lists and dicts", "list", "List", "list of arrays")
def turn_a_list(world, where, n):
    for found in one_of(lists(world), where):
        found.reverse()


def dicts(world):
    return [x for x in holders(world.all()) if isinstance(x, (dict, nnx.Dict)) and len(x)]


@change("lists and dicts", "dict", "Dict")
def change_an_entry(world, where, n):
    for found in one_of(dicts(world), where):
        if n % 3 == 0:
            found["new"] = node(n)
        elif n % 3 == 1:
            key = next(iter(found))
            found[key] = found.pop(key)  # to the end
        else:
            found[sorted(found)[0]] = n if n % 2 else array(n)


@change("lists and dicts", "Dict", "dict")
def delete_an_entry(world, where, n):
    for found in one_of(dicts(world), where):
        del found[sorted(found)[n % len(found)]]


@change("lists and dicts", "box")
def fill_a_box(world, where, n):
    for place in one_of(places(world.all(), lambda x: isinstance(x, Box)), where):
        place.get().content = None
        place.get().content = nnx.Param(array(n))


@change("lists and dicts", "State")
def grow_a_state(world, where, n):
    for place in one_of(places(world.all(), lambda x: isinstance(x, nnx.State)), where):
        place.get()["s"]["tu"[n % 2]] = nnx.Param(array(n))


@change("tuples", "tuple", "named tuple")
def drop_a_tuple_then_make_one(world, where, n):
    for place in one_of(places(world.all(), is_data_tuple), where):
        kind, elements = type(place.get()), [node(n + i) for i in range(len(place.get()))]
        place.replace(tuple if kind is tuple else kind._make, elements)


@change("tuples", "tuple with a number", "List of tuples")
def set_a_number_in_a_tuple(world, where, n):
    def is_numbered(x):
        return is_data_tuple(x) and type(x[-1]) is int

    for place in one_of(places(world.all(), is_numbered), where):
        elements = list(place.get())
        elements[-1] = n + 10
        place.replace(tuple, elements)


@change("tuples", "tuple")
def turn_a_tuple(world, where, n):
    for place in one_of(places(world.all(), is_data_tuple), where):
        kind, elements = type(place.get()), list(place.get())[::-1]
        place.replace(tuple if kind is tuple else kind._make, elements)


# ---- static values ------------------------------------------------------------------------------


@change("statics", "number")
def set_a_number(world, where, n):
    for place in one_of(places(world.all(), lambda x: type(x) in (int, bool, float)), where):
        place.set((n + 10, bool(n % 2), float(n % 2), n % 2)[n % 4])


@change("statics", "numbers", "entries", "config", "settings", "options", "user dict")
def change_a_static_value_in_place(world, where, n):
    def can_change(x):
        return type(x) in (Config, ArraySettings, HashedOptions, UserDict) or (
            type(x) in (list, dict) and len(x) < 9 and not _has_data(x)
        )

    for place in one_of(places(world.all(), can_change), where):
        found = place.get()
        if type(found) is list:
            found.append(n)
        elif type(found) is dict:
            found["size"] = n
        elif type(found) is Config:
            if n % 2:
                found.width += n
            else:
                found.beside_its_fields = n
        elif type(found) is HashedOptions:
            found.size += n
        else:
            change_a_table(found, n)


@change("statics", "config", "settings", "options", "user dict")
def put_another_static_value(world, where, n):
    makers = {cls: cls for cls in (Config, ArraySettings, HashedOptions)} | {UserDict: user_dict}
    for place in one_of(places(world.all(), lambda x: type(x) in makers), where):
        place.set(makers[type(place.get())](n % 3))


def _has_data(x):
    return any(is_member(item) or is_array(item) for item in (x.values() if type(x) is dict else x))


@change("statics", "switch")
def train_or_evaluate(world, where, n):
    for found in one_of(switches(world.all()), where):
        found.train() if found.deterministic else found.eval()


@change("metadata", "count", "param")
def set_metadata(world, where, n):
    for variable in one_of(variables(world.all()), where):
        if n % 4:
            variable.set_metadata(role=n)
        elif variable.has_metadata("role"):
            variable.del_metadata("role")


@change("metadata", "param", "count")
def initialise_again(world, where, n):
    for variable in one_of(reshapable(world.all()), where):
        metadata = {"role": n} if n % 2 else {}
        nnx.Variable.__init__(variable, plus(variable.raw_value, n), **metadata)


@change("metadata", "listed metadata")
def grow_listed_metadata(world, where, n):
    found = [v for v in variables(world.all()) if type(v.get_metadata("axes", None)) is list]
    for variable in one_of(found, where):
        variable.get_metadata("axes").append(n)


@change("metadata", "param", "adam")
def freeze_or_unfreeze(world, where, n):
    params = [v for v in variables(world.all()) if isinstance(v, nnx.Param)]
    params += [x.w for x in models(world) if isinstance(x.w, nnx.Variable)]
    for variable in one_of(params, where):
        if variable.has_metadata("frozen"):
            nnx.unfreeze(variable)
        elif jax.tree.leaves(variable.raw_value)[0].dtype == jnp.float32:
            nnx.freeze(variable)


# ---- functions ----------------------------------------------------------------------------------


def run_cells_again(world, where, *templates, **numbers):
    """Defines numbers and functions of one notebook anew, and hands out the new ``act``."""
    found = places(world.all(), is_notebook_function)
    for place in one_of(found, where):
        namespace = place.get().__globals__
        namespace.update(numbers)
        for template in templates:
            cell(template, namespace)
        for holder in found:
            if holder.get().__globals__ is namespace:
                holder.set(namespace["act"])


@change("functions", "function")
def run_a_cell_with_another_number(world, where, n):
    run_cells_again(world, where, act, rate=n + 10)


@change("functions", "function")
def run_a_cell_with_another_helper(world, where, n):
    run_cells_again(world, where, other_helper if n % 2 else helper, act, shift=n + 20)


@change("functions", "function")
def run_all_cells_but_the_helper(world, where, n):
    run_cells_again(world, where, act, shift=n + 30)


@change("functions", "function")
def set_a_function_of_another_notebook(world, where, n):
    for place in one_of(places(world.all(), is_notebook_function), where):
        place.set(notebook(n + 10)["act"])


# ---- streams and optimizers ---------------------------------------------------------------------


def rngs_places(world):
    return places(world.all(), lambda x: isinstance(x, nnx.Rngs))


@change("streams", "unused Rngs")
def replace_rngs(world, where, n):
    for place in one_of(rngs_places(world), where):
        place.replace(lambda: nnx.Rngs(n) if n % 2 else nnx.Rngs(n, noise=n + 5))


@change("streams", "unused Rngs")
def draw_outside(world, where, n):
    for place in one_of(rngs_places(world), where):
        place.get()() if "default" in place.get() else None


@change("streams", "unused Rngs")
def change_a_stream(world, where, n):
    for place in one_of(rngs_places(world), where):
        rngs = place.get()
        if n % 3 == 0:
            rngs.extra = nnx.RngStream(n, tag="extra")
        elif n % 3 == 1:
            rngs.default = nnx.RngStream(n, tag="default")
        else:
            nnx.reseed(rngs, default=n)


@change("streams", "unused Rngs")
def reach_rngs_twice(world, where, n):
    for place in one_of(rngs_places(world), where):
        for holder in one_of(nodes(world.all()), n):
            holder.rngs = place.get()


@change("streams", "unused Rngs")
def keep_one_stream(world, where, n):
    for place in one_of(rngs_places(world), where):
        for holder in one_of(nodes(world.all()), n):
            if "default" in place.get():
                holder.stream = place.get().default


def models(world):
    return [x for _, x in optimizers(world.all()) if isinstance(x, Trained)]


def injected(world):
    states = [optimizer.opt_state for optimizer, _ in optimizers(world.all())]
    return [state.hyperparams for state in states if hasattr(state, "hyperparams")]


@change("hyperparameters", "injected rate")
def put_an_array_for_the_rate(world, where, n):
    for hyperparams in one_of(injected(world), where):
        hyperparams["learning_rate"] = jnp.float32(n)


@change("hyperparameters", "injected rate")
def put_a_variable_for_the_rate(world, where, n):
    for hyperparams in one_of(injected(world), where):
        del hyperparams["learning_rate"]
        hyperparams["learning_rate"] = nnx.OptArray(jnp.float32(n))


@change("hyperparameters", "injected rate")
def write_the_rate(world, where, n):
    for hyperparams in one_of(injected(world), where):
        rate = hyperparams["learning_rate"]
        if isinstance(rate, nnx.Variable):
            rate.value = jnp.float32(n)


@change("hyperparameters", "adam")
def replace_a_trained_parameter(world, where, n):
    for model in one_of(models(world), where):
        del model.w
        model.w = nnx.Param(jnp.full(2, float(n)))


# ---- whole worlds -------------------------------------------------------------------------------


@change("copies", "child")
def replace_a_root_by_its_copy(world, where, n):
    copies = (nnx.clone, copy.deepcopy, lambda x: nnx.merge(*nnx.split(x)))
    for name in one_of(sorted(world.roots), where):
        old = world.roots.pop(name)
        world.roots[name] = copies[n % len(copies)](old)
        world.roots = dict(sorted(world.roots.items()))


@change("copies", "param")
def update_from_a_state(world, where, n):
    for name in one_of(sorted(world.roots), where):
        state = nnx.as_pure(nnx.state(world.roots[name], nnx.Param))
        nnx.update(world.roots[name], jax.tree.map(lambda x: plus(x, n), state))


@change("copies")
def pass_through_pickle(world, where, n):
    for place in one_of(places(world.all(), lambda x: type(x) is nnx.Param), where):
        place.set(pickle.loads(pickle.dumps(place.get())))


@change("copies", "child")
def drop_a_root_then_make_one(world, where, n):
    for name in one_of(sorted(world.roots), where):
        del world.roots[name]
        world.roots[name] = Node()
        world.roots[name].child = node(n)
        world.roots = dict(sorted(world.roots.items()))


# ---- writes that do not pass through __setattr__ ------------------------------------------------
#
# Linnet does not notice the first group, as docs/compiled.md says; it has a test of its own.


@change("around setattr", "param")
def write_to_vars(world, where, n):
    for found in one_of(nodes(world.all()), where):
        vars(found)[NAMES[n % 8]] = nnx.Param(array(n)) if n % 2 else node(n)


@change("around setattr", "param")
def set_by_object(world, where, n):
    for found in one_of(nodes(world.all()), where):
        object.__setattr__(found, NAMES[n % 8], nnx.Param(array(n)) if n % 2 else n)


@change("around setattr", "param")
def update_the_dict(world, where, n):
    for found in one_of(nodes(world.all()), where):
        found.__dict__.update({NAMES[n % 8]: nnx.Param(array(n)), NAMES[n % 7]: n})


@change("around setattr", "param")
def delete_from_vars(world, where, n):
    for found in one_of(nodes(world.all()), where):
        for name in one_of(sorted(vars(found)), n):
            del vars(found)[name]


@change("own storage", "child")
def set_the_state(world, where, n):
    for found in one_of(nodes(world.all()), where):
        found.__setstate__(copy.copy(node(n).__getstate__()))


@change("own storage", "wayward child", "wilful child")
def write_to_a_wayward_object(world, where, n):
    own = [x for x in nodes(world.all()) if isinstance(x, (Wayward, Wilful))]
    for found in one_of(own, where):
        made = (nnx.Param(array(n)), array(n, 3), n, node(n))
        setattr(found, ("v", NAMES[n % 8])[n % 2], made[n % 4])


GROUPS = sorted({found.group for found in CHANGES.values()})
AROUND = frozenset({"around setattr"})
