"""Follow foreign code from where it enters a request: the shared objects it reaches and writes.

Reached code counts as called, with arguments private to the call: a shared object that is passed to
a function, or returned, is a reason by itself (`keep`).
"""

import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, cast

from torch import nn

from carpool.engine.foreign_code import all_blocks
from carpool.engine.reach import names, objects
from carpool.engine.reach.objects import (
    ABSENT,
    CODE,
    CONTAINERS,
    DATA,
    EMPTY,
    HOOKS,
    UNKNOWN,
    UNSEEN,
    Ownership,
    Ref,
    Value,
    function_of,
    is_foreign,
    is_plain,
    of_class,
    own_dict,
)  # fmt: skip
from carpool.engine.reach.source import FunctionReader, tree_of

MAX_FUNCTIONS = 2000  # read at most
_ARGUMENT: Value = frozenset({Ref(UNKNOWN, "given")})


class Walk:
    """Follows code; `reasons` are the reasons against a shared ride."""

    def __init__(self, pipe: Any, *, is_brought: bool = False) -> None:
        objects.foreign_functions.cache_clear()
        self.is_brought = is_brought  # the code comes with a request
        self.reasons: dict[str, None] = {}
        self.names: list[tuple[Callable[[], Any], Any]] = []  # lookups, and their results then
        self._pipe, self._place = pipe, "the request"
        self._entered: dict[Any, Any] = {}  # objects by id, and classes without foreign code
        self._referents, self._functions = set[Ref](), set[Any]()
        self._unread: list[tuple[FunctionType, dict[str, Value]]] = []

    def reason(self, text: str) -> None:
        self.reasons.setdefault(f"`{self._place}` {text}")

    # Entry points

    def enter(self, obj: Any, kind: Ownership, text: str, *first: Value, depth: int = 5) -> None:
        """Follow the code of an object and of its parts.

        Args:
            first: the first arguments of its functions, or of its methods after `self`.
        """
        is_picture = objects.package(type(obj)) == "PIL"  # it may hold its file until it is read
        if is_plain(obj) or is_picture or isinstance(obj, (type, *DATA)) or not depth:
            return
        unknown = UNSEEN if self.is_brought else _ARGUMENT  # a caller may pass anything
        rest = EMPTY if kind == "own" or (self.is_brought and first) else unknown
        if isinstance(obj, FunctionType):
            return self.run(obj, *first, text=text, rest=rest)
        self.refer(obj, "shared" if self.is_brought else kind, text)
        if isinstance(obj, CODE) or id(obj) in self._entered:
            return
        self._entered[id(obj)] = obj
        if self.is_brought:
            self.names.append((partial(_parts, obj), _parts(obj)))
        if isinstance(obj, CONTAINERS) and not is_foreign(type(obj)):
            for part in objects.entries(obj):
                self.enter(part, kind, text, *first, depth=depth - 1)
            return
        kind, depth = ("shared", 5) if isinstance(obj, nn.Module) else (kind, depth)
        me: Value = frozenset({Ref(obj, kind)})
        is_used = kind == "own" and not self.is_brought and is_foreign(type(self._pipe))
        self._enter_methods(obj, me, *first, rest=rest, is_all=not is_used)
        for block in all_blocks(own_dict(obj).get("_blocks")):
            self._enter_methods(block, frozenset({Ref(block, "own")}), me, rest=EMPTY, is_all=False)
        for name, part in own_dict(obj).items():
            if self.is_brought or type(part) not in (OrderedDict, *CONTAINERS) or part:
                arguments = (me,) if name in HOOKS else first if self.is_brought else ()
                self.enter(part, kind, name, *arguments, depth=depth - 1)

    def _enter_methods(self, obj: Any, *first: Value, rest: Value, is_all: bool) -> None:
        """Follow the foreign methods of an object that libraries call.

        These are its overrides of library methods; all methods, if no library knows its class.
        """
        order, cls = type(obj).__mro__[:-1], cast("Any", type(obj))
        functions = {} if cls in self._entered else dict(objects.foreign_functions(cls))
        if not functions:
            self._entered[cls] = cls
        is_all = is_all and all(map(is_foreign, order))
        for name in functions:
            is_override = any(name in vars(base) for base in order if not is_foreign(base))
            is_override = is_override and not names.SETTING_UP.match(name)
            is_override = is_override or name in ("__call__", "forward")
            if (is_all or is_override) and not names.AT_CREATION.match(name):
                self.run(of_class(cls, name), *first, rest=rest)

    # Objects

    def refer(self, obj: Any, kind: Ownership, text: str) -> Value:
        """Add a reached object, unless it is immutable; follow its code."""
        obj = obj() if isinstance(obj, weakref.ReferenceType) else obj
        if is_plain(obj):
            return EMPTY
        ref = Ref(obj, "shared" if isinstance(obj, (nn.Module, *CODE)) else kind)
        value: Value = frozenset({ref})
        if ref in self._referents:
            return value
        self._referents.add(ref)
        if cause := objects.cause(obj, self._pipe, is_own=ref.kind == "own"):
            self.reason(f"reaches `{text}`: {cause}")
        elif isinstance(obj, nn.Module):
            self.enter(obj, "shared", text)
        elif isinstance(obj, partial):
            parts = [self.refer(part, kind, text) for part in (*obj.args, *obj.keywords.values())]
            self.run(obj.func, *parts[: len(obj.args)], text=text)
        elif isinstance(obj, MethodType):  # the bound object is copied with its owner
            self.run(obj.__func__, self.refer(obj.__self__, kind, text), text=text)
        elif isinstance(obj, BuiltinFunctionType) and isinstance(obj.__self__, CONTAINERS):
            self.attribute(self.refer(obj.__self__, kind, text), obj.__name__, text)
        elif isinstance(obj, type) and is_foreign(type(obj)):
            self.reason(f"reaches `{text}`, whose metaclass decides what it does")
        elif not isinstance(obj, (type, ModuleType)):
            self.run(obj, text=text)
            self.methods(value, _is_operator)
        return value

    def methods(self, value: Value, is_called: Callable[[str], bool] = bool) -> Value:
        """Follow the foreign methods of objects, by name; returns their possible results."""
        for ref in value:
            for name, member in objects.foreign_functions(ref.cls):
                if name in ("__getattr__", "__getattribute__"):
                    self.reason(f"reaches a {ref.cls.__name__}, whose {name} decides what it is")
                elif is_called(name) and (name == "__init__" or not names.AT_CREATION.match(name)):
                    self.run(member, _first(ref, member))
        return UNSEEN if any(ref.kind == "shared" for ref in value) else EMPTY

    def attribute(self, value: Value, name: str, text: str) -> Value:
        if names.ANYWHERE.match(name):
            self.reason(f"names `{text}`")
        return EMPTY.union(*[self._attribute(ref, name, text) for ref in value])

    def _attribute(self, ref: Ref, name: str, text: str) -> Value:
        obj, attributes, member = ref.obj, own_dict(ref.obj), of_class(ref.cls, name)
        function = function_of(member)
        is_code = isinstance(function, FunctionType) and is_foreign(function)
        if ref.kind == "shared" and not is_code and not isinstance(obj, CODE):
            is_of_module = isinstance(obj, nn.Module) and name.startswith(names.OF_MODULES)
            if names.WRITERS.match(name) or (is_of_module and name not in attributes):
                self.write(frozenset({ref}), text)
        if obj is UNKNOWN:
            return UNSEEN if name in ("weight", "bias") else frozenset({ref})
        if name == "__class__":
            return self.refer(ref.cls, "shared", text)
        if name == "__dict__" or (name in names.VIEWS and isinstance(obj, DATA)):
            return frozenset({ref})
        if ref.kind == "shared" and not isinstance(obj, nn.Module):
            self.names.append((partial(attributes.get, name, ABSENT), attributes.get(name, ABSENT)))
        if name in attributes:
            return self.refer(attributes[name], ref.kind, text)
        if is_code:
            self.run(function, _first(ref, member), text=text)
            return UNSEEN if function is not member and ref.kind == "shared" else EMPTY
        if member is ABSENT or (hasattr(type(member), "__get__") and not is_foreign(type(member))):
            is_fresh = ref.kind == "own" or isinstance(obj, (*DATA, *CODE))
            return EMPTY if is_fresh and name != "components" else UNSEEN
        return self.refer(member, "shared", text)

    def items(self, value: Value, text: str, key: Any = ABSENT) -> Value:
        """The entries of containers; other objects stand for themselves."""
        answer = EMPTY
        for ref in value:
            if not isinstance(ref.obj, (*CONTAINERS, nn.Module)):
                answer |= {ref}
                continue
            if isinstance(ref.obj, defaultdict) and key is not ABSENT:
                self.write(frozenset({ref}), text)
            answer |= UNSEEN if isinstance(ref.obj, nn.Module) else EMPTY  # its parameters
            for part in objects.entries(ref.obj, key):
                is_known = part is not UNKNOWN
                answer |= self.refer(part, ref.kind, text) if is_known else {Ref(part, ref.kind)}
        return answer

    # Effects of code

    def write(self, value: Value, text: str, name: str = "") -> None:
        """Record a write on objects, or on their attribute `name`."""
        for ref in value:
            member = of_class(ref.cls, name)
            if ref.kind == "shared" or (ref.kind == "given" and name):
                self.reason(f"writes `{text}`, which others may reach")
            elif isinstance(member, property):
                self.run(member.fset, frozenset({ref}))
            elif is_foreign(type(member)):  # may be a descriptor
                self.refer(member, "shared", text)

    def keep(self, value: Value, text: str) -> None:
        """Record that code passes on shared objects, which its receiver may change."""
        for ref in value:
            is_object = isinstance(ref.obj, CONTAINERS) or is_foreign(type(ref.obj))
            if ref.kind == "own" and isinstance(ref.obj, type):  # an instance that the call created
                self.methods(frozenset({ref}))
            elif ref.kind == "shared" and is_object and not isinstance(ref.obj, (nn.Module, *CODE)):
                self.reason(f"hands on what others reach: `{text}`")

    def called(self, owner: Value, callee: Value, name: str, args: list[Value], text: str) -> Value:
        """The result of a call whose function has been followed."""
        first, operands = args[0] if args else EMPTY, EMPTY.union(owner, *args)
        is_of_class = any(isinstance(ref.obj, type) and not is_foreign(ref.obj) for ref in owner)
        if names.ON_THE_FIRST.match(name) or (is_of_class and names.WRITERS.match(name)):
            self.write(first, text)
        if names.IN_PLACE.match(name) and all(isinstance(ref.obj, ModuleType) for ref in owner):
            self.write(first, text)
        if name == "type" and len(args) == 1:
            return self.attribute(first, "__class__", text) or UNSEEN
        code = [ref.obj for ref in callee if isinstance(ref.obj, CODE) and is_foreign(ref.obj)]
        if code:
            instances = frozenset(Ref(cls, "own") for cls in code if isinstance(cls, type))
            self.methods(instances, lambda name: name == "__init__" or _is_operator(name))
            self.keep(EMPTY.union(*args), text)
            return instances
        if any(hasattr(ref.obj, "cache_info") for ref in callee):  # `lru_cache` objects
            return UNSEEN
        if names.ENTRIES.match(name):
            return self.items(operands, text)
        return operands if names.VIEWING.match(name) else EMPTY

    def run(self, function: Any, *first: Value, text: str = "", rest: Value = EMPTY) -> None:
        """Follow a function, given its first arguments and the possible values of all others."""
        wrapper, function = function, function_of(function)
        if isinstance(wrapper, FunctionType) and not is_foreign(wrapper):  # decorated by a library
            cells = [getattr(cell, "cell_contents", None) for cell in wrapper.__closure__ or ()]
            for inner in [*cells, *getattr(wrapper, "registry", {}).values()]:
                if isinstance(inner, FunctionType) and is_foreign(inner):
                    self.run(inner, *first, rest=rest)
        if not isinstance(function, FunctionType) or not is_foreign(function):
            if hasattr(function, "__qualname__") and is_foreign(function):
                self.reason(f"calls compiled code: `{text}`")
            return
        code = function.__code__
        is_made = code.co_filename.startswith("<") and code.co_name.startswith("__")
        if is_made or (key := (function, *first, rest)) in self._functions:  # or a dataclass's
            return
        self._functions.add(key)
        positional = code.co_varnames[: code.co_argcount]
        values = dict.fromkeys(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount], rest)
        values |= dict(zip(positional, first, strict=False))
        defaults = zip(positional[::-1], (function.__defaults__ or ())[::-1], strict=False)
        for name, default in [*defaults, *(function.__kwdefaults__ or {}).items()]:
            values[name] = values.get(name, EMPTY) | self.refer(default, "shared", name)
        self._unread.append((function, values))

    def read(self) -> list[str]:
        """Read the followed functions; returns the reasons."""
        while self._unread:
            function, values = self._unread.pop()
            self._place = function.__qualname__
            if len(self._functions) > MAX_FUNCTIONS:
                self.reason("has more code than is read")
            elif (tree := tree_of(function)) is None:
                self.reason("has no source that can be read")
            else:
                FunctionReader(self, function, values).read(tree)
        return list(self.reasons)


def _parts(obj: Any) -> Any:
    return obj if type(obj) in CONTAINERS else (*own_dict(obj).values(),)


def _first(ref: Ref, member: Any) -> Value:
    """The first argument of a class's function that is called through an object."""
    if isinstance(member, classmethod):
        return frozenset({Ref(ref.cls)})
    is_object = ref.kind == "own" or not isinstance(ref.obj, type)
    return frozenset({ref}) if is_object and not isinstance(member, staticmethod) else EMPTY


def _is_operator(name: str) -> bool:
    """Whether an operator or other syntax calls a method."""
    return name.startswith("__") and name not in names.CONTEXT and not names.AT_CREATION.match(name)
