"""JitFunction: the callable that ``nnx.jit`` makes.

A call goes as in every transform: the arguments are opened, the compiled function builds fresh
objects inside (``enter``), runs, and says what it changed (``leave``), and that is written into the
objects outside (``close``). Only opening is special. Outside of traces the objects are opened by
their records (``plan``), which cost no walk where they hold; the values of Variables are read from
the Variables that the records list, and results are written to the same ones.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable
from itertools import chain, compress
from operator import not_
from types import MethodType
from typing import Any

import jax

from linnet.nnx.bulk import set_raw_values
from linnet.nnx.graphlib.modes import graph_mode, graph_updates
from linnet.nnx.kinds import ARRAY, OBJECT, VARIABLE, key_name, kind_of
from linnet.nnx.tracing import EAGER, current_trace
from linnet.nnx.tracing_state import compiling, naming
from linnet.nnx.transforms import plan as plans
from linnet.nnx.transforms import retrace
from linnet.nnx.transforms.arguments import NO_STATIC, NOTHING_DONATED, Donated, Given, Static
from linnet.nnx.transforms.compiled import Entry, Lowered, Outcome, Traced
from linnet.nnx.transforms.failures import FailedCall
from linnet.nnx.transforms.lift import Effects, Opened, Structure, close, is_node, open_tree
from linnet.nnx.var_storage import from_refs, settle_seeds
from linnet.nnx.watch import home_of

_COMMON = {OBJECT, ARRAY}
_NODES = (OBJECT, VARIABLE)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, (int, str)) else tuple(value)


class JitFunction:
    """A function compiled by ``nnx.jit``; called like the function it wraps."""

    def __init__(self, fun: Callable[..., Any], api: str, graph: Any, updates: Any, options: Any):
        functools.update_wrapper(self, fun)
        self.fun = fun
        self._api = api
        self._graph = graph
        self._updates = updates
        self._options = options
        self._static_nums = _as_tuple(options.pop("static_argnums", None))
        self._static_names = set(_as_tuple(options.pop("static_argnames", None)))
        self._donate_nums = _as_tuple(options.pop("donate_argnums", None))
        self._donate_names = set(_as_tuple(options.pop("donate_argnames", None)))
        self._in_shardings = options.pop("in_shardings", None)
        self._out_shardings = options.pop("out_shardings", None)
        self._resolve_names()
        self._entries: dict[Any, Entry] = {}
        self._plans: dict[Any, plans.Plan] = {}
        self._by_form: dict[Any, Entry] = {}  # the same entries, for objects that are new
        self.traces = retrace.TraceLog(fun)
        self._only: tuple[Any, Structure] | None = None

    def _resolve_names(self) -> None:
        """Static and donated arguments are the same by number and by name."""
        try:
            parameters = list(inspect.signature(self.fun).parameters.values())
        except (TypeError, ValueError):
            return
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [p.name for p in parameters if p.kind in kinds]
        size = len(names)
        for nums, found in (
            ("_static_nums", self._static_names),
            ("_donate_nums", self._donate_names),
        ):
            given = [n + size if n < 0 else n for n in getattr(self, nums)]
            by_name = [names.index(name) for name in found if name in names]
            found.update(names[n] for n in given if n < size)
            setattr(self, nums, tuple(sorted({*given, *by_name})))

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __repr__(self) -> str:
        return f"nnx.{self._api}({self.fun!r})"

    # ---- calling --------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        graph, updates = graph_mode(self._graph), graph_updates(self._updates)
        given = self._flatten(args, kwargs)
        if current_trace() is not EAGER:
            opened = self._open(given, graph)
            return self._run(self._entry(opened, given.static, graph, updates), opened, given)
        places = tuple([kind_of(leaf) in _NODES for leaf in given.leaves])
        roots = list(compress(given.leaves, places))
        plain = list(compress(given.leaves, map(not_, places)))
        form = (graph, updates, given.treedef, given.static, places)
        key = (form, *map(id, roots))
        plan = self._plans.get(key)
        if plan is not None and not plan.is_for(roots):
            plan = None
        taken = []
        try:
            for lock in _locks(roots) if plan is None else plan.locks:
                lock.acquire()
                taken.append(lock)
            return self._call_outside(given, roots, plain, key, plan)
        finally:
            for lock in taken:
                lock.release()

    def _call_outside(
        self, given: Given, roots: list[Any], plain: list[Any], key: Any, plan: plans.Plan | None
    ) -> Any:
        """A call outside of all traces, the locks of the objects taken."""
        form = key[0]
        records = None if plan is None else plan.known()
        if records is None:
            tree = given.treedef.unflatten(given.leaves)
            where = self.traces.where
            records = plans.find_records(roots, form[0], self._api, where, tree)
            plan = self._plan(roots, records, key)
        if plans.CHECK_PLANS:
            plans.check(self._known(given, records, plain), self._open(given, form[0]))
        forms = tuple([record.form for record in records])
        entry = self._by_form.get((form, forms)) if plan is None else plan.entries.get(forms)
        if entry is None:
            opened = self._known(given, records, plain)
            self._refuse_both(given.static, opened)
            entry = self._entry(opened, given.static, form[0], form[1])
            if plan is None:
                self._by_form[form, forms] = entry
            else:
                plan.entries[forms] = entry
        variables = None if plan is None else plan.variables
        if variables is None:
            variables = list(chain.from_iterable([record.variables for record in records]))
        arrays = list(chain.from_iterable([record.arrays() for record in records]))
        values = [variable._raw for variable in variables]
        if entry.uses_refs:
            values = list(map(from_refs, values))
        elif entry.takes_values:
            values = settle_seeds(values)
        outcome = self._dispatch(entry, values, arrays, plain, given)
        effects = outcome.effects
        if effects.is_plain and effects.last < len(variables) and not entry.uses_refs:
            set_raw_values(effects.pick(variables), outcome.changed)
            return outcome.plain
        opened = self._known(given, records, plain)
        return close(opened, effects, outcome.changed, outcome.news, outcome.plain)

    def _plan(self, roots: list[Any], records: list[plans.Record], key: Any) -> plans.Plan | None:
        """Remembers the records for these objects, if all of them are kept."""
        known, itself = self._plans, key
        if not roots or not all(record.is_kept for record in records):
            known.pop(key, None)
            return None
        plan = plans.Plan(roots, records, _locks(roots), lambda _: known.pop(itself, None))
        known[key] = plan
        return plan

    def _known(self, given: Given, records: list[plans.Record], plain: list[Any]) -> Opened:
        tree = given.treedef.unflatten(given.leaves)
        return plans.opened_from(given.treedef, given.leaves, records, plain, tree)

    def _run(self, entry: Entry, opened: Opened, given: Given) -> Any:
        """Runs the compiled function on opened arguments, and writes out what it did."""
        outcome = self._dispatch(entry, opened.values, opened.arrays, opened.plain, given)
        return close(opened, outcome.effects, outcome.changed, outcome.news, outcome.plain)

    def _dispatch(
        self, entry: Entry, values: Any, arrays: Any, plain: Any, given: Given
    ) -> Outcome:
        try:
            return entry.jitted(*entry.donated.divide(values, arrays, plain))
        except (RuntimeError, ValueError, TypeError) as error:
            opened = open_tree(given.treedef.unflatten(given.leaves), True, self._api)
            FailedCall(error, opened, entry.donated, self._api, self.traces.where).explain()
            raise

    def _flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        """The arguments as leaves, objects among them, and static ones apart."""
        static = NO_STATIC
        if self._static_nums or self._static_names:
            static, args, kwargs = self._take_static(args, kwargs)
        if not kwargs and _COMMON.issuperset(map(kind_of, args)):
            return Given(args, _positional_treedef(len(args)), static)
        leaves, treedef = jax.tree_util.tree_flatten((args, kwargs), is_leaf=is_node)
        return Given(leaves, treedef, static)

    def _open(self, given: Given, graph: bool) -> Opened:
        """The arguments taken apart by a walk."""
        tree = given.treedef.unflatten(given.leaves)
        opened = open_tree(tree, graph, self._api, where=self.traces.where)
        self._refuse_both(given.static, opened)
        return opened

    def _shards(self) -> bool:
        return self._in_shardings is not None or self._out_shardings is not None

    def _prepare(self, args: Any, kwargs: Any, graph: bool, updates: bool) -> Any:
        """The arguments opened, their entry, and what it is called with."""
        given = self._flatten(args, kwargs)
        opened = self._open(given, graph)
        entry = self._entry(opened, given.static, graph, updates)
        return opened, entry, entry.donated.divide(opened.values, opened.arrays, opened.plain)

    def _take_static(self, args: Any, kwargs: Any) -> Any:
        """Static arguments as a hashable key, and the others with gaps where those were."""
        static_args = tuple(
            (number, args[number]) for number in self._static_nums if number < len(args)
        )
        static_kwargs = tuple((k, v) for k, v in sorted(kwargs.items()) if k in self._static_names)
        for where, value in (*static_args, *static_kwargs):
            self._check_static(where, value)
        numbers = {number for number, _ in static_args}
        rest = tuple(None if n in numbers else arg for n, arg in enumerate(args))
        named = {k: v for k, v in kwargs.items() if k not in self._static_names}
        types = tuple(type(value) for _, value in (*static_args, *static_kwargs))
        return Static(static_args, static_kwargs, types), rest, named

    def _check_static(self, where: Any, value: Any) -> None:
        try:
            hash(value)
        except TypeError:
            raise ValueError(
                f"Non-hashable static argument {where!r} of nnx.{self._api}: "
                f"{type(value).__name__}.\nFix: pass something hashable, such as a tuple, or do "
                "not mark it static."
            ) from None

    def _refuse_both(self, static: Static, opened: Opened) -> None:
        """Raises for an object that is a static argument and an ordinary one at once."""
        if static is NO_STATIC:
            return
        met = {id(thing) for thing in opened.seen}
        for where, value in (*static.args, *static.kwargs):
            inside = open_tree(value, True, self._api).seen
            if any(is_node(thing) and id(thing) in met for thing in inside):
                raise ValueError(
                    f"The {type(value).__name__} given as static argument {where!r} of "
                    f"nnx.{self._api} is also part of another argument, so its arrays would be "
                    "constants in one place and traced in the other.\n"
                    "Fix: pass it once, and not as a static argument."
                )

    def _donated(self, opened: Opened) -> Donated:
        """What came in through a donated argument."""
        if not self._donate_nums and not self._donate_names:
            return NOTHING_DONATED
        wanted = {(0, n) for n in self._donate_nums} | {(1, name) for name in self._donate_names}
        leaves = jax.tree_util.tree_leaves_with_path(opened.tree, is_leaf=is_node)
        plain = [
            (path, leaf)
            for (path, leaf), form in zip(leaves, opened.structure.forms, strict=True)
            if form is None
        ]
        starts = [(tuple(key_name(key) for key in path[:2]), leaf) for path, leaf in plain]
        return Donated(
            tuple(path[:2] in wanted for path in opened.variable_paths),
            tuple(start in wanted for start, _ in starts),
        )

    def _entry(self, opened: Opened, static: Static, graph: bool, updates: bool) -> Entry:
        donated = self._donated(opened)
        if self._only is not None:
            self._check_structure(opened.structure, self._only[1])
            return Entry(opened.structure, donated, self._only[0], True)
        key = (opened.structure, static, donated, graph, updates)
        entry = self._entries.get(key)
        if entry is None:
            pure = self._pure(opened.structure, donated, graph, updates, static)
            jit_options = dict(self._options)
            if self._shards():
                from linnet.nnx.transforms import shardings

                given = shardings.with_gaps(self._in_shardings, static)
                jit_options |= shardings.jit_options(
                    opened, donated, given, self._out_shardings, pure, self.traces.where
                )
            if donated.any:
                jit_options["donate_argnums"] = (1,)
            jitted = jax.jit(pure, **jit_options)
            takes_values = self._shards() or donated.any
            entry = self._entries[key] = Entry(opened.structure, donated, jitted, takes_values)
        return entry

    def _pure(
        self, structure: Structure, donated: Donated, graph: bool, updates: bool, static: Static
    ) -> Callable[..., Outcome]:
        """The function of arrays that JAX compiles for one structure."""
        fun, api, traces = self.fun, self._api, self.traces

        def pure(values: Any, given: Any, arrays: Any, plain: Any) -> Outcome:
            values, plain = donated.join(values, given, plain)
            inside = structure.enter(values, arrays, plain)
            traces.add(inside.tree, static)
            args, kwargs = static.put_back(*inside.tree)
            with compiling(traces.name), naming(inside.nodes):
                out = fun(*args, **kwargs)
            effects, news, leaves = inside.leave(out, graph, updates, api, traces.where)
            effects = inside.with_moved(effects)
            if donated.any:  # a donated buffer is gone, so every one must come back
                effects = _with_changed(effects, {*effects.changed, *donated.numbers})
            changed = [inside.raw(number) for number in effects.changed]
            if not any(effects.out_parts):
                effects = _with_plain_output(effects)
                return Outcome(effects, changed, news, out)
            return Outcome(effects, changed, news, leaves)

        functools.update_wrapper(pure, fun)
        pure.__dict__.pop("__wrapped__", None)  # JAX would take the signature from there
        return pure

    # ---- beside calling -------------------------------------------------------------------------

    def _inspect(self, args: Any, kwargs: Any) -> Any:
        return self._prepare(args, kwargs, graph_mode(self._graph), graph_updates(self._updates))

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Traces and lowers for these arguments without running."""
        return self.trace(*args, **kwargs).lower()

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """Traces for these arguments without running; see ``jax.jit``."""
        opened, entry, inputs = self._inspect(args, kwargs)
        static = self._take_static(args, kwargs)[0]
        return Traced(self, entry.jitted.trace(*inputs), opened.structure, static)

    def running(self, compiled: Any, structure: Structure) -> JitFunction:
        """The same function for arguments of one structure, with what was compiled for them."""
        function = JitFunction.__new__(JitFunction)
        function.__dict__.update(self.__dict__)
        function._plans, function._by_form = {}, {}
        function._only = (compiled, structure)
        return function

    def _check_structure(self, found: Structure, wanted: Structure) -> None:
        if found != wanted:
            reason = retrace.difference(self.traces, wanted, found)
            raise TypeError(
                f"This compiled function is for other arguments: {reason}.\n"
                "Fix: lower and compile it for these; static arguments are left out of the call."
            )

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The shapes of the output for these arguments, without running."""
        opened, entry, inputs = self._inspect(args, kwargs)
        outcome = entry.jitted.eval_shape(*inputs)
        shapes = jax.eval_shape(lambda leaves: leaves, (opened.values, opened.arrays))
        copies = opened.structure.enter(*shapes, opened.plain)
        copied = open_tree(copies.tree, True, self._api)
        return close(copied, outcome.effects, outcome.changed, outcome.news, outcome.plain)

    def clear_cache(self) -> None:
        """Forgets everything compiled so far."""
        for entry in self._entries.values():
            entry.jitted.clear_cache()
        self._entries.clear()
        self._by_form.clear()
        self._plans.clear()


def _with_changed(effects: Effects, numbers: Iterable[int]) -> Effects:
    return dataclasses.replace(effects, changed=tuple(sorted(numbers)))


def _with_plain_output(effects: Effects) -> Effects:
    return dataclasses.replace(effects, out_treedef=None, out_parts=())


def _locks(roots: list[Any]) -> list[Any]:
    """The locks of objects, in one order for everyone, so that nobody waits for one who waits."""
    homes = {home.serial: home for home in map(home_of, roots)}
    return [homes[serial].lock for serial in sorted(homes)]


@functools.lru_cache(maxsize=256)
def _positional_treedef(count: int) -> Any:
    return jax.tree_util.tree_structure(((0,) * count, {}))
