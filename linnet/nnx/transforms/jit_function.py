"""JitFunction: the callable that ``nnx.jit`` makes."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import jax

from linnet.errors import DonatedBufferError
from linnet.nnx.bulk import set_raw_values
from linnet.nnx.graphlib.modes import graph_mode, graph_updates
from linnet.nnx.kinds import OBJECT, key_name, kind_of
from linnet.nnx.rnglib import Rngs
from linnet.nnx.tracing import EAGER, current_trace
from linnet.nnx.tracing_state import compiling, naming
from linnet.nnx.transforms import retrace
from linnet.nnx.transforms.arguments import Donated, Rebuild, Restore, RngsEscaped
from linnet.nnx.transforms.compiled import Entry, Lowered, Outcome, Traced
from linnet.nnx.transforms.lift import (
    Effects,
    Opened,
    Structure,
    close,
    is_node,
    join_structures,
    open_tree,
)
from linnet.nnx.transforms.plan import CHECK_PLANS, Plan, is_plain


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
        self._seeds_suffice = True  # an Rngs that nobody used yet can be passed as its seeds
        self._volatile: set[int] = set()  # positions whose objects are new in every call
        self._previous: dict[int, weakref.ref[Any]] = {}
        self._met: dict[int, weakref.ref[Any]] = {}
        self._plannable = (
            not (self._static_nums or self._static_names or self._donate_nums or self._donate_names)
            and not self._shards()
        )
        self.traces = retrace.TraceLog(fun)

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
        if kwargs or not self._plannable or current_trace() is not EAGER:
            return self._call_slowly(args, kwargs, graph, updates)
        places = self._places(args)
        if places is None:
            return self._call_slowly(args, kwargs, graph, updates)
        call = self._call_planned if _can_plan(places) else self._call_unplanned
        try:
            return call(args, places, graph, updates)
        except RngsEscaped:
            self._seeds_suffice = False
            return self(*args)

    def _places(self, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """What each argument is to a plan; None if there is something it cannot handle."""
        places: list[Any] = []
        for position, arg in enumerate(args):
            if kind_of(arg) != OBJECT:
                if not is_plain(arg):
                    return None
                places.append(None)
            elif type(arg) is Rngs and self._seeds_suffice and arg.is_pending():
                places.append("rngs")
            elif position in self._volatile and not self._stays(position, arg):
                places.append("fresh")
            else:
                places.append("known")
        return tuple(places)

    def _call_planned(self, args: Any, places: Any, graph: bool, updates: bool) -> Any:
        pairs = list(zip(args, places, strict=True))
        roots = [arg for arg, place in pairs if place == "known"]
        key = (graph, updates, places, *map(id, roots))
        plan = self._plans.get(key)
        if plan is None or not plan.holds(roots):
            plan = self._make_plan(args, places, roots, key, plan)
            if plan is None:
                return self._call_unplanned(args, places, graph, updates)
        elif CHECK_PLANS:
            plan.check(_only_known(args, places), graph, self._api)
        values, arrays, variables, entry = plan.values(), plan.arrays(), plan.variables, plan.entry
        fresh = tuple(arg for arg, place in pairs if place == "fresh")
        if fresh:
            opened = open_tree(fresh, graph, self._api, plan.size)
            if any(id(thing) in plan.ids for thing in opened.seen):
                return self._call_unplanned(args, places, graph, updates)
            values, arrays = values + opened.values, arrays + opened.arrays
            variables = variables + opened.variables
            entry = self._fresh_entry(entry, opened.structure, places, graph, updates)
        outcome = self._run(entry, values, arrays, args, places, graph)
        effects = outcome.effects
        if effects.out_treedef is not None or effects.parts is not None or plan.uses_refs:
            opened = open_tree(_only_known(args, _all_known(places)), graph, self._api)
            result = close(opened, effects, outcome.changed, outcome.news, outcome.plain)
        else:
            targets = [variables[n] for n in effects.changed] if fresh else plan.targets_of(effects)
            set_raw_values(targets, outcome.changed)
            result = outcome.plain
        if outcome.counts:
            _count_drawn(pairs, outcome.counts)
        return result

    def _call_unplanned(self, args: Any, places: Any, graph: bool, updates: bool) -> Any:
        """A call that walks its objects, with the compiled function of a planned one."""
        places = _all_known(places)
        opened = open_tree(_only_known(args, places), graph, self._api)
        entry = self._entry(opened.structure, ("plan", places), graph, updates, Rebuild(places))
        outcome = self._run(entry, opened.values, opened.arrays, args, places, graph)
        result = close(opened, outcome.effects, outcome.changed, outcome.news, outcome.plain)
        _count_drawn(zip(args, places, strict=True), outcome.counts)
        return result

    def _run(
        self, entry: Entry, values: Any, arrays: Any, args: Any, places: Any, graph: bool
    ) -> Outcome:
        pairs = zip(args, places, strict=True)
        rest = [a.pending() if p == "rngs" else a for a, p in pairs if p in (None, "rngs")]
        try:
            return entry.jitted(values, (), arrays, rest)
        except (RuntimeError, ValueError) as error:
            self._explain(error, args, {}, graph)
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

    def _notice_fresh(self, args: tuple[Any, ...]) -> bool:
        """Finds arguments whose predecessor is gone: they are expected to be new in every call."""
        found = False
        for position, arg in enumerate(args):
            if kind_of(arg) == OBJECT:
                before = self._previous.get(position)
                if before is not None and before() is None and position not in self._volatile:
                    self._volatile.add(position)
                    found = True
                self._previous[position] = weakref.ref(arg)
                self._meet(arg)
        return found

    def _make_plan(
        self, args: Any, places: Any, roots: Any, key: Any, older: Plan | None
    ) -> Plan | None:
        self._plans.pop(key, None)
        if self._notice_fresh(args):
            return None
        graph, updates = key[0], key[1]
        opened = open_tree(_only_known(args, places), graph, self._api)
        entry = self._entry(opened.structure, ("plan", places), graph, updates, Rebuild(places))
        plan = Plan(roots, opened, entry, lambda: self._plans.pop(key, None))
        if not plan.usable:
            return None
        if older is not None:
            plan.adopt(older)
        self._plans[key] = plan
        return plan

    def _fresh_entry(
        self, entry: Entry, fresh: Structure, places: Any, graph: bool, updates: bool
    ) -> Entry:
        joined = entry.with_fresh.get(fresh)
        if joined is None:
            numbers = [number for number, place in enumerate(places) if place == "fresh"]
            structure = join_structures(entry.structure, fresh, numbers)
            places = _all_known(places)
            joined = self._entry(structure, ("plan", places), graph, updates, Rebuild(places))
            entry.with_fresh[fresh] = joined
        return joined

    def _shards(self) -> bool:
        return self._in_shardings is not None or self._out_shardings is not None

    def _call_slowly(self, args: Any, kwargs: Any, graph: bool, updates: bool) -> Any:
        opened, entry, inputs = self._prepare(args, kwargs, graph, updates)
        try:
            outcome = entry.jitted(*inputs)
        except (RuntimeError, ValueError) as error:
            self._explain(error, args, kwargs, graph)
            raise
        return close(opened, outcome.effects, outcome.changed, outcome.news, outcome.plain)

    def _prepare(self, args: Any, kwargs: Any, graph: bool, updates: bool) -> Any:
        static_args, args, kwargs = self._take_static(args, kwargs)
        opened = open_tree((args, kwargs), graph, self._api)
        self._refuse_both(static_args, opened)
        donated = self._donated(opened)
        types = tuple(type(value) for group in static_args for _, value in group)  # 1 is not True
        options = ("slow", static_args, types, donated)
        rebuild = Restore(static_args)
        entry = self._entry(opened.structure, options, graph, updates, rebuild, opened, donated)
        return opened, entry, donated.divide(opened.values, opened.arrays, opened.plain)

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
        return (static_args, static_kwargs), rest, named

    def _check_static(self, where: Any, value: Any) -> None:
        try:
            hash(value)
        except TypeError:
            raise ValueError(
                f"Non-hashable static argument {where!r} of nnx.{self._api}: "
                f"{type(value).__name__}.\nFix: pass something hashable, such as a tuple, or do "
                "not mark it static."
            ) from None

    def _refuse_both(self, static_args: Any, opened: Opened) -> None:
        """Raises for an object that is a static argument and an ordinary one at once."""
        met = {id(thing) for thing in opened.seen}
        for where, value in (*static_args[0], *static_args[1]):
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
            return Donated()
        wanted = {(0, n) for n in self._donate_nums} | {(1, name) for name in self._donate_names}
        leaves = jax.tree_util.tree_leaves_with_path(opened.tree, is_leaf=is_node)
        plain_paths = [path for path, leaf in leaves if not is_node(leaf)]
        starts = [tuple(key_name(key) for key in path[:2]) for path in plain_paths]
        return Donated(
            frozenset(n for n, path in enumerate(opened.variable_paths) if path[:2] in wanted),
            frozenset(n for n, start in enumerate(starts) if start in wanted),
        )

    def _entry(
        self,
        structure: Structure,
        options: Any,
        graph: bool,
        updates: bool,
        rebuild: Any,
        opened: Opened | None = None,
        donated: Donated = Donated(),  # noqa: B008
    ) -> Entry:
        key = (structure, options, graph, updates)
        entry = self._entries.get(key)
        if entry is None:
            pure = self._pure(structure, donated, graph, updates, rebuild)
            jit_options = dict(self._options)
            if self._shards() and opened is not None:
                from linnet.nnx.transforms import shardings

                given = shardings.with_gaps(self._in_shardings, rebuild.static_args)
                jit_options |= shardings.jit_options(
                    opened, donated, given, self._out_shardings, pure
                )
            if donated.any:
                jit_options["donate_argnums"] = (1,)
            jitted = jax.jit(pure, **jit_options)
            entry = self._entries[key] = Entry(structure, jitted)
        return entry

    def _pure(
        self, structure: Structure, donated: Donated, graph: bool, updates: bool, rebuild: Any
    ) -> Callable[..., Outcome]:
        """The function of arrays that JAX compiles for one structure."""
        fun, api, traces = self.fun, self._api, self.traces

        def pure(values: Any, given: Any, arrays: Any, plain: Any) -> Outcome:
            values, plain = donated.join(values, given, plain)
            inside, args, kwargs = rebuild(structure, values, arrays, plain)
            traces.add(args, kwargs, rebuild.static_args)
            with compiling(traces.name), naming(inside.nodes):
                out = fun(*args, **kwargs)
            effects, news, leaves = inside.leave(out, graph, updates, api)
            counts = _drawn_counts(inside, args)
            if donated.any:  # a donated buffer is gone, so every one must come back
                effects = _with_changed(effects, {*effects.changed, *donated.variables})
            changed = [inside.raw(number) for number in effects.changed]
            if not any(effects.out_parts):
                effects = _with_plain_output(effects)
                return Outcome(effects, changed, news, out, counts)
            return Outcome(effects, changed, news, leaves, counts)

        functools.update_wrapper(pure, fun)
        pure.__dict__.pop("__wrapped__", None)  # JAX would take the signature from there
        return pure

    def _explain(self, error: Exception, args: Any, kwargs: Any, graph: bool) -> None:
        """Raises a clearer error if a Variable's buffer is gone."""
        if "deleted" not in str(error) and "donated" not in str(error):
            return
        opened = open_tree((args, kwargs), graph, self._api)
        gone = [
            self.traces.where(path)
            for path, value in zip(opened.variable_paths, opened.values, strict=True)
            if any(getattr(x, "is_deleted", bool)() for x in jax.tree_util.tree_leaves(value))
        ]
        if gone:
            raise DonatedBufferError(
                f"The buffer of {', '.join(gone)} was donated to an earlier call and is gone.\n"
                "Fix: use the objects that the call updated, or keep a copy with "
                "nnx.clone(model, arrays=True) before donating."
            ) from error

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
def _can_plan(places: Any) -> bool:
    """Whether there are known objects, and all that are new in every call come after them."""
    nodes = [place for place in places if place in ("known", "fresh")]
    return "known" in nodes and nodes == sorted(nodes, reverse=True)


def _all_known(places: Any) -> tuple[Any, ...]:
    return tuple("known" if place == "fresh" else place for place in places)


def _count_drawn(pairs: Any, counts: Any) -> None:
    """Tells each Rngs that was passed as seeds how often it was drawn from."""
    drawn = iter(counts)
    for arg, place in pairs:
        if place == "rngs":
            arg.count_pending(next(drawn))


def _only_known(args: Any, places: Any) -> Any:
    """Positional arguments with None for those that are not known objects."""
    pairs = zip(args, places, strict=True)
    return (tuple(arg if place == "known" else None for arg, place in pairs), {})


def _drawn_counts(inside: Any, args: Any) -> list[dict[str, Any]]:
    """How often each Rngs that came in as seeds was drawn from."""
    pending = [arg for arg in args if isinstance(arg, Rngs) and arg.came_pending()]
    if pending and not all(rngs.is_undisturbed(inside.left) for rngs in pending):
        raise RngsEscaped
    return [rngs.drawn_counts() for rngs in pending]
