"""The API with both switches on: shared references, and changes of structure inside transforms.

``nnx.compat.split`` is ``nnx.split`` with ``graph=True``, ``nnx.compat.jit`` is ``nnx.jit`` with
``graph=True, graph_updates=True``, and so on, whatever the ambient settings are.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from linnet.nnx import graphlib, spmd, transforms
from linnet.nnx.modules import module, views
from linnet.nnx.rnglib import splitting


def _switched_on(f: Callable[..., Any]) -> Callable[..., Any]:
    names = inspect.signature(f).parameters
    switches = {name: True for name in ("graph", "graph_updates") if name in names}
    return functools.wraps(f)(functools.partial(f, **switches))


backup_keys = _switched_on(splitting.backup_keys)
cached_partial = _switched_on(transforms.cached_partial)
checkify = _switched_on(transforms.checkify)
clone = _switched_on(graphlib.clone)
cond = _switched_on(transforms.cond)
custom_vjp = _switched_on(transforms.custom_vjp)
eval_shape = _switched_on(transforms.eval_shape)
flatten = _switched_on(graphlib.flatten)
fori_loop = _switched_on(transforms.fori_loop)
fork_rngs = _switched_on(splitting.fork_rngs)
get_abstract_model = _switched_on(spmd.get_abstract_model)
grad = _switched_on(transforms.grad)
graphdef = _switched_on(graphlib.graphdef)
iter_children = _switched_on(graphlib.iter_children)
iter_graph = _switched_on(graphlib.iter_graph)
iter_modules = _switched_on(module.iter_modules)
jit = _switched_on(transforms.jit)
jvp = _switched_on(transforms.jvp)
pmap = _switched_on(transforms.pmap)
recursive_map = _switched_on(graphlib.recursive_map)
remat = _switched_on(transforms.remat)
reseed = _switched_on(splitting.reseed)
scan = _switched_on(transforms.scan)
shard_map = _switched_on(transforms.shard_map)
split = _switched_on(graphlib.split)
split_rngs = _switched_on(splitting.split_rngs)
state = _switched_on(graphlib.state)
switch = _switched_on(transforms.switch)
value_and_grad = _switched_on(transforms.value_and_grad)
view = _switched_on(views.view)
view_info = _switched_on(views.view_info)
vjp = _switched_on(transforms.vjp)
vmap = _switched_on(transforms.vmap)
while_loop = _switched_on(transforms.while_loop)
