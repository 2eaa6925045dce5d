"""JitFunction: the callable that ``nnx.jit`` makes."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import Any

import jax

from linnet.nnx.bulk import set_raw_values
from linnet.nnx.graphlib.modes import graph_mode, graph_updates
from linnet.nnx.kinds import ARRAY, OBJECT, key_name, kind_of
from linnet.nnx.rnglib import PendingRngs, Rngs
from linnet.nnx.tracing import EAGER, current_trace
from linnet.nnx.tracing_state import compiling, naming
from linnet.nnx.transforms import retrace
from linnet.nnx.transforms.arguments import (
    FRESH,
    KNOWN,
    NO_STATIC,
    NOTHING_DONATED,
    SEEDS,
    Donated,
    Given,
    RngsEscaped,
    Static,
)
from linnet.nnx.transforms.compiled import Entry, Lowered, Outcome, Traced
from linnet.nnx.transforms.failures import FailedCall
from linnet.nnx.transforms.lift import (
    Effects,
    Opened,
    Structure,
    close,
    is_node,
    open_tree,
)
from linnet.nnx.transforms.plan import CHECK_PLANS, Plan

_COMMON = {OBJECT, ARRAY}


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
        self._plans: dict[Any, Plan] = {}
        # An Rngs that nobody used yet can be passed as its seeds.
        self._seeds_suffice = not self._shards()
        self._volatile: set[int] = set()  # positions whose objects are new in every call
        self._previous: dict[int, weakref.ref[Any]] = {}
        self._met: dict[int, weakref.ref[Any]] = {}
        # Shardings and donated buffers are settled for all objects of a call together.
        self._whole = bool(self._donate_nums or self._donate_names) or self._shards()
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
        try:
            return self._call(args, kwargs)
        except RngsEscaped:
            self._seeds_suffice = False
            return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        graph, updates = graph_mode(self._graph), graph_updates(self._updates)
        given = self._flatten(args, kwargs)
        if current_trace() is not EAGER:
            return self._call_unplanned(given, _as_known(given.leaves), graph, updates)
        places = self._places(given.leaves)
        call = self._call_planned if _can_plan(places, self._whole) else self._call_unplanned
        return call(given, places, graph, updates)

    def _flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        """The arguments as leaves, objects among them, and static ones apart."""
        static = NO_STATIC
        if self._static_nums or self._static_names:
            static, args, kwargs = self._take_static(args, kwargs)
        if not kwargs and _COMMON.issuperset(map(kind_of, args)):
            return Given(args, _positional_treedef(len(args)), static)
        leaves, treedef = jax.tree_util.tree_flatten((args, kwargs), is_leaf=is_node)
        return Given(leaves, treedef, static)

    def _places(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """What each leaf of the arguments is to a plan; None for what is not an object."""
        places: list[Any] = []
        for position, leaf in enumerate(leaves):
            if not is_node(leaf):
                places.append(None)
            elif type(leaf) is Rngs and self._seeds_suffice and leaf.is_pending():
                places.append(SEEDS)
            elif position in self._volatile and not self._stays(position, leaf):
                places.append(FRESH)
            else:
                places.append(KNOWN)
        return tuple(places)

    def _call_planned(self, given: Given, places: Any, graph: bool, updates: bool) -> Any:
        leaves = given.leaves
        roots = [leaf for leaf, place in zip(leaves, places, strict=True) if place is KNOWN]
        key = (graph, updates, given.treedef, places, given.static, *map(id, roots))
        plan = self._plans.get(key)
        if plan is None or not plan.holds(roots):
            plan = self._make_plan(given, places, roots, key, plan)
            if plan is None:
                return self._call_unplanned(given, places, graph, updates)
        elif CHECK_PLANS:
            plan.check(self._open(given, places, graph))
        values, arrays, variables, entry = plan.values(), plan.arrays(), plan.variables, plan.entry
        fresh = FRESH in places
        if fresh:
            late = [leaf for leaf, place in zip(leaves, places, strict=True) if place is FRESH]
            opened = open_tree(late, graph, self._api, plan.size)
            if any(id(thing) in plan.ids for thing in opened.seen):
                return self._call_unplanned(given, places, graph, updates)
            values, arrays = values + opened.values, arrays + opened.arrays
            variables = variables + opened.variables
            entry = self._fresh_entry(entry, opened.structure, given, places, graph, updates)
        outcome = self._run(entry, values, arrays, given, places, graph)
        effects = outcome.effects
        if effects.out_treedef is not None or effects.parts is not None or plan.uses_refs:
            opened = self._open(given, _all_known(places), graph)
            result = close(opened, effects, outcome.changed, outcome.news, outcome.plain)
        else:
            targets = [variables[n] for n in effects.changed] if fresh else plan.targets_of(effects)
            set_raw_values(targets, outcome.changed)
            result = outcome.plain
        if outcome.counts:
            _count_drawn(leaves, places, outcome.counts)
        return result

    def _call_unplanned(self, given: Given, places: Any, graph: bool, updates: bool) -> Any:
        """A call that walks its objects, with the compiled function of a planned one."""
        places = _all_known(places)
        opened = self._open(given, places, graph)
        entry = self._entry(opened, given.static, graph, updates)
        outcome = self._run(entry, opened.values, opened.arrays, given, places, graph)
        result = close(opened, outcome.effects, outcome.changed, outcome.news, outcome.plain)
        _count_drawn(given.leaves, places, outcome.counts)
        return result

    def _open(self, given: Given, places: Any, graph: bool) -> Opened:
        """The objects that are known taken apart; all else counts as plain."""
        plain = frozenset(n for n, place in enumerate(places) if place is not KNOWN)
        tree = given.treedef.unflatten(given.leaves)
        opened = open_tree(tree, graph, self._api, plain=plain, where=self.traces.where)
        self._refuse_both(given.static, opened)
        return opened

    def _run(
        self, entry: Entry, values: Any, arrays: Any, given: Given, places: Any, graph: bool
    ) -> Outcome:
        pairs = zip(given.leaves, places, strict=True)
        plain = [a.pending() if p is SEEDS else a for a, p in pairs if p is None or p is SEEDS]
        try:
            return entry.jitted(*entry.donated.divide(values, arrays, plain))
        except (RuntimeError, ValueError, TypeError) as error:
            opened = self._open(given, places, graph)
            where = self.traces.where
            FailedCall(error, given, opened, places, entry.donated, self._api, where).explain()
            raise

    def _stays(self, position: int, arg: Any) -> bool:
        """Whether an object was met here before, where objects used to be new in every call."""
        met = self._met.get(id(arg))
        if met is not None and met() is arg:
            self._volatile.discard(position)
            return True
        self._meet(arg)
        return False

    def _meet(self, arg: Any) -> None:
        key = id(arg)
        self._met[key] = weakref.ref(arg, lambda _: self._met.pop(key, None))

    def _notice_fresh(self, leaves: Sequence[Any]) -> bool:
        """Finds arguments whose predecessor is gone: they are expected to be new in every call."""
        found = False
        for position, leaf in enumerate(leaves):
            if is_node(leaf):
                before = self._previous.get(position)
                if before is not None and before() is None and position not in self._volatile:
                    self._volatile.add(position)
                    found = True
                self._previous[position] = weakref.ref(leaf)
                self._meet(leaf)
        return found

    def _make_plan(
        self, given: Given, places: Any, roots: Any, key: Any, older: Plan | None
    ) -> Plan | None:
        self._plans.pop(key, None)
        if self._only is None and self._notice_fresh(given.leaves):
            return None
        graph, updates = key[0], key[1]
        opened = self._open(given, places, graph)
        entry = self._entry(opened, given.static, graph, updates)
        plan = Plan(roots, opened, entry, lambda: self._plans.pop(key, None))
        if not plan.usable:
            return None
        if older is not None:
            plan.adopt(older)
        self._plans[key] = plan
        return plan

    def _fresh_entry(
        self, entry: Entry, fresh: Structure, given: Given, places: Any, graph: Any, updates: Any
    ) -> Entry:
        """The entry for known objects together with others, all after them, of a structure."""
        joined = entry.with_fresh.get((places, fresh))
        if joined is None:
            opened = self._open(given, _all_known(places), graph)
            joined = self._entry(opened, given.static, graph, updates)
            entry.with_fresh[places, fresh] = joined
        return joined

    def _shards(self) -> bool:
        return self._in_shardings is not None or self._out_shardings is not None

    def _prepare(self, args: Any, kwargs: Any, graph: bool, updates: bool) -> Any:
        """The arguments opened, their entry, and what it is called with."""
        given = self._flatten(args, kwargs)
        opened = self._open(given, _as_known(given.leaves), graph)
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
            for (path, leaf), definition in zip(leaves, opened.structure.definitions, strict=True)
            if definition is None
        ]
        starts = [(tuple(key_name(key) for key in path[:2]), leaf) for path, leaf in plain]
        return Donated(
            tuple(path[:2] in wanted for path in opened.variable_paths),
            tuple(start in wanted and not is_node(leaf) for start, leaf in starts),
        )

    def _entry(self, opened: Opened, static: Static, graph: bool, updates: bool) -> Entry:
        donated = self._donated(opened)
        if self._only is not None:
            self._check_structure(opened.structure, self._only[1])
            return Entry(opened.structure, donated, self._only[0])
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
            entry = self._entries[key] = Entry(opened.structure, donated, jitted)
        return entry

    def _pure(
        self, structure: Structure, donated: Donated, graph: bool, updates: bool, static: Static
    ) -> Callable[..., Outcome]:
        """The function of arrays that JAX compiles for one structure."""
        fun, api, traces = self.fun, self._api, self.traces

        def pure(values: Any, given: Any, arrays: Any, plain: Any) -> Outcome:
            values, plain = donated.join(values, given, plain)
            plain = [x.settle() if isinstance(x, PendingRngs) else x for x in plain]
            inside = structure.enter(values, arrays, plain)
            traces.add(inside.tree, static)
            args, kwargs = static.put_back(*inside.tree)
            with compiling(traces.name), naming(inside.nodes):
                out = fun(*args, **kwargs)
            effects, news, leaves = inside.leave(out, graph, updates, api, traces.where)
            counts = _drawn_counts(inside, plain)
            if donated.any:  # a donated buffer is gone, so every one must come back
                effects = _with_changed(effects, {*effects.changed, *donated.numbers})
            changed = [inside.raw(number) for number in effects.changed]
            if not any(effects.out_parts):
                effects = _with_plain_output(effects)
                return Outcome(effects, changed, news, out, counts)
            return Outcome(effects, changed, news, leaves, counts)

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
        function._plans, function._volatile, function._seeds_suffice = {}, set(), False
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
        self._plans.clear()


def _with_changed(effects: Effects, numbers: Iterable[int]) -> Effects:
    return dataclasses.replace(effects, changed=tuple(sorted(numbers)))


def _with_plain_output(effects: Effects) -> Effects:
    return dataclasses.replace(effects, out_treedef=None, out_parts=())


@functools.lru_cache(maxsize=1024)
def _can_plan(places: Any, whole: bool) -> bool:
    """Whether there are known objects, and all that are new in every call come after them.

    With ``whole`` all objects of a call must be known beforehand.
    """
    nodes = [place for place in places if place in (KNOWN, FRESH)]
    if whole and FRESH in nodes:
        return False
    return KNOWN in nodes and nodes == sorted(nodes, reverse=True)


def _all_known(places: Any) -> tuple[Any, ...]:
    return tuple(KNOWN if place is FRESH else place for place in places)


def _as_known(leaves: Any) -> tuple[Any, ...]:
    return tuple(KNOWN if is_node(leaf) else None for leaf in leaves)


@functools.lru_cache(maxsize=256)
def _positional_treedef(count: int) -> Any:
    return jax.tree_util.tree_structure(((0,) * count, {}))


def _count_drawn(leaves: Any, places: Any, counts: Any) -> None:
    """Tells each Rngs that was passed as seeds how often it was drawn from."""
    drawn = iter(counts)
    for leaf, place in zip(leaves, places, strict=True):
        if place is SEEDS:
            leaf.count_pending(next(drawn))


def _drawn_counts(inside: Any, plain: Any) -> list[dict[str, Any]]:
    """How often each Rngs that came in as seeds was drawn from."""
    pending = [leaf for leaf in plain if isinstance(leaf, Rngs)]
    if pending and not all(rngs.is_undisturbed(inside.left) for rngs in pending):
        raise RngsEscaped
    return [rngs.drawn_counts() for rngs in pending]
