"""Read one function: follow its expressions, and report reached and written objects to a walk.

An assignment replaces a name's value only if it always runs. A function is read twice, for its
loops and nested functions.
"""

import ast
import builtins
import linecache
import sys
from collections import Counter, defaultdict
from contextlib import suppress
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

from carpool.engine.reach import names
from carpool.engine.reach.objects import ABSENT, EMPTY, Value

if TYPE_CHECKING:
    from carpool.engine.reach.walk import Walk

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_PASSING = (  # expressions that return their parts
    *(ast.IfExp, ast.BoolOp, ast.Await, ast.ListComp, ast.SetComp, ast.GeneratorExp),
)
_KEEPING = (ast.List, ast.Tuple, ast.Set, ast.Return, ast.Yield, ast.YieldFrom)
_functions: dict[str, dict[tuple[str, int], list[Function]]] = {}  # per file, by name and line


def tree_of(function: FunctionType) -> Function | None:
    """The syntax tree of a function; None if its source is missing or ambiguous."""
    code = function.__code__
    if code.co_filename not in _functions:
        lines = linecache.getlines(code.co_filename, function.__globals__)
        _functions[code.co_filename] = _of_text("".join(lines))
    nodes = _functions[code.co_filename].get((code.co_name, code.co_firstlineno), [])
    return nodes[0] if len(nodes) == 1 else None


def _of_text(text: str) -> dict[tuple[str, int], list[Function]]:
    functions = defaultdict[tuple[str, int], list[Function]](list)
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return functions
    for node in ast.walk(tree):
        if isinstance(node, Function):
            decorators = getattr(node, "decorator_list", [])
            line = min(node.lineno, *(entry.lineno for entry in decorators), sys.maxsize)
            functions[getattr(node, "name", "<lambda>"), line].append(node)
    return functions


class FunctionReader(ast.NodeVisitor):
    """Follows the values of one function's expressions."""

    def __init__(self, walk: "Walk", function: FunctionType, values: dict[str, Value]) -> None:
        self._walk, self._function, self._names = walk, function, values
        self._locals = {*function.__code__.co_varnames, *function.__code__.co_cellvars}
        self._outer = set[str]()  # global or enclosing names that it writes
        self._is_sure = False

    def read(self, tree: Function) -> None:
        body: list[ast.AST] = [tree.body] if isinstance(tree, ast.Lambda) else [*tree.body]
        if self._walk.is_brought:
            self._locals |= _logs(tree) & {*self._function.__code__.co_freevars}
        for statement in 2 * body:
            self._is_sure = isinstance(statement, (ast.Assign, ast.AnnAssign))
            self.visit(statement)

    def generic_visit(self, node: ast.AST) -> Value:
        value = self._union(*ast.iter_child_nodes(node))
        if isinstance(node, _KEEPING):
            self._walk.keep(value, ast.unparse(node))
        return value if isinstance(node, (*_PASSING, *_KEEPING)) else EMPTY

    def _union(self, *nodes: ast.AST | None) -> Value:
        return EMPTY.union(*[self.visit(node) for node in nodes if node is not None])

    # names

    def visit_Name(self, node: ast.Name) -> Value:
        name, code, outer = node.id, self._function.__code__, self._function.__globals__
        value = self._names.get(name, EMPTY)
        if name in self._locals:
            return value
        find = partial(outer.get, name, ABSENT)
        if name in code.co_freevars:
            cell = (self._function.__closure__ or ())[code.co_freevars.index(name)]
            find = partial(getattr, cell, "cell_contents", ABSENT)
        self._walk.names.append((find, obj := find()))
        obj = getattr(builtins, name, ABSENT) if obj is ABSENT else obj
        return value if obj is ABSENT else value | self._walk.refer(obj, "shared", name)

    def visit_Global(self, node: ast.Global | ast.Nonlocal) -> Value:
        self._outer |= set(node.names) - self._locals
        return EMPTY

    visit_Nonlocal = visit_Global

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> Value:
        space = dict(self._function.__globals__)
        with suppress(ImportError):  # an expected failure, as in code that tries an import
            exec(compile(ast.Module([node], []), "<import>", "exec"), space)
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            self._bind(name, self._walk.refer(space.get(name), "shared", name))
        return EMPTY

    visit_ImportFrom = visit_Import

    # expressions

    def visit_Attribute(self, node: ast.Attribute) -> Value:
        if isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super":
            parameters = self._function.__code__.co_varnames
            me = self._names.get(parameters[0] if parameters else "", EMPTY)
            return self._walk.methods(me, node.attr.__eq__)
        return self._walk.attribute(self.visit(node.value), node.attr, ast.unparse(node))

    def visit_Subscript(self, node: ast.Subscript) -> Value:
        self.visit(node.slice)
        key = node.slice.value if isinstance(node.slice, ast.Constant) else None
        return self._walk.items(self.visit(node.value), ast.unparse(node), key)

    def visit_Starred(self, node: ast.Starred) -> Value:
        return self._walk.items(self.visit(node.value), ast.unparse(node))

    def visit_Dict(self, node: ast.Dict) -> Value:
        for key, part in zip(node.keys, node.values, strict=True):
            value = self._union(part, key)
            self._walk.keep(value if key else EMPTY, ast.unparse(node))
        return EMPTY

    def visit_Call(self, node: ast.Call) -> Value:
        args = [self.visit(argument) for argument in node.args]
        named = {entry.arg: self.visit(entry.value) for entry in node.keywords}
        text = ast.unparse(node.func)
        self._walk.write(named.get("out", EMPTY), f"out of {text}")
        if isinstance(node.func, ast.Name) and text in ("getattr", "setattr", "delattr", "open"):
            return self._special(text, node, args)
        owner = self.visit(node.func.value) if isinstance(node.func, ast.Attribute) else EMPTY
        callee, name = self.visit(node.func), text.rpartition(".")[2]
        return self._walk.called(owner, callee, name, [*args, *named.values()], text)

    def _special(self, name: str, node: ast.Call, args: list[Value]) -> Value:
        """Follow a builtin that reads or writes attributes by name, or opens a file."""
        second, rest = node.args[1] if len(node.args) > 1 else None, EMPTY.union(*args[2:])
        attribute = getattr(second, "value", None)
        if name == "open":
            modes = [second, *(entry.value for entry in node.keywords if entry.arg == "mode")]
            letters = [str(getattr(mode, "value", "w")) for mode in modes if mode is not None]
            if set("".join(letters)) - set("rbt"):
                self._walk.reason("opens a file for writing")
        elif name != "getattr":
            text = f"{name}({ast.unparse(node.args[0])})"
            self._walk.write(args[0], text, str(attribute))
            self._walk.keep(rest, text)
        elif isinstance(attribute, str):
            return rest | self._walk.attribute(args[0], attribute, ast.unparse(node))
        else:
            return rest | self._walk.methods(args[0])
        return EMPTY

    # statements

    def _bind(self, name: str, value: Value) -> None:
        self._names[name] = value if self._is_sure else self._names.get(name, EMPTY) | value

    def _assign(self, target: ast.AST, value: Value) -> None:
        text = ast.unparse(target)
        match target:
            case ast.Name():
                if target.id in self._outer:
                    self._walk.reason(f"writes `{text}`, which is outside of it")
                self._bind(target.id, value)
            case ast.Tuple() | ast.List():
                for entry in target.elts:
                    self._assign(entry, value | self._walk.items(value, text))
            case ast.Starred():
                self._assign(target.value, value)
            case ast.Attribute() | ast.Subscript():
                self._walk.write(self.visit(target.value), text, getattr(target, "attr", ""))
                self._walk.keep(value, text)

    def visit_Assign(self, node: ast.Assign | ast.Delete) -> Value:
        source: Any = getattr(node, "value", None)
        for target in node.targets:
            pairs = [(target, source)]
            if isinstance(target, ast.Tuple) and isinstance(source, ast.Tuple):
                is_even = len(target.elts) == len(source.elts)
                pairs = [*zip(target.elts, source.elts, strict=True)] if is_even else pairs
            for part, value in pairs:
                self._assign(part, self._union(value))
        return EMPTY

    visit_Delete = visit_Assign

    def visit_AnnAssign(self, node: ast.AnnAssign | ast.NamedExpr) -> Value:
        if node.value is None:
            return EMPTY
        self._assign(node.target, value := self._union(node.value))
        return value

    visit_NamedExpr = visit_AnnAssign

    def visit_AugAssign(self, node: ast.AugAssign) -> Value:
        self.visit(node.value)
        if not isinstance(node.target, ast.Name) or node.target.id in self._outer:
            self._assign(node.target, EMPTY)
        self._walk.write(self.visit(node.target), ast.unparse(node.target))  # may be in place
        return EMPTY

    def visit_For(self, node: ast.For | ast.AsyncFor | ast.comprehension) -> Value:
        self._assign(node.target, self._walk.items(self.visit(node.iter), ast.unparse(node.iter)))
        for name in ("body", "orelse", "ifs"):
            self._union(*getattr(node, name, ()))
        return EMPTY

    visit_AsyncFor = visit_comprehension = visit_For

    def visit_withitem(self, node: ast.withitem) -> Value:
        self._walk.methods(value := self.visit(node.context_expr), names.CONTEXT.__contains__)
        if node.optional_vars is not None:
            self._assign(node.optional_vars, value)
        return EMPTY

    def visit_FunctionDef(self, node: Function) -> Value:
        """Follow a nested function; its variables are private to the call."""
        self._is_sure = False
        self._walk.keep(self._union(*node.args.defaults, *node.args.kw_defaults), "a default")
        return self.generic_visit(node)

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef


def _logs(tree: Function) -> set[str]:
    """The names of lists that a function only appends to."""
    uses, appends = Counter[str](), Counter[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name):
                uses[name] += 1
            case ast.Expr(
                value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append"))
            ):
                appends[name] += 1
    return {name for name, count in appends.items() if uses[name] == count}
