"""What single instructions do to the stack and the variables, and the actions that they are."""

import dis
import sys
from collections.abc import Iterable
from types import CodeType
from typing import Any

from carpool.engine.reach.instructions import (
    ADDS,
    LOCALS,
    PLAIN,
    SAME,
    StackState,
    UnreadableCode,
    has_box,
    move_variables,
    parameters,
    pop,
    pop_many,
    super_of,
)
from carpool.engine.reach.summary import (
    FRESH,
    NOTHING,
    Action,
    CodeSummary,
    Made,
    Value,
    attribute,
    box,
    item,
)


class Effects:
    """Applies the instructions of one code object, jumps aside, and notes its actions."""

    def __init__(self, code: CodeType) -> None:
        self.summary = CodeSummary(code)
        self.actions: dict[tuple[int, int], Action] = {}  # by offset, and number there
        self._code = code
        self._keywords: tuple[str, ...] = ()

    def apply(self, instruction: dis.Instruction, state: StackState) -> None:
        name, stack = instruction.opname, state.stack
        if name in PLAIN:
            taken, left = PLAIN[name]
            values = pop_many(stack, taken)
            if name == "YIELD_VALUE":
                self.summary.returns |= box(*values)
            stack.extend([FRESH] * left)
        elif name in LOCALS:
            move_variables(name, instruction.argval, state)
        elif name in ADDS:
            self._add(instruction, state)
        elif name not in SAME:
            handler = getattr(self, "_" + name.lower(), None)
            if handler is None:
                raise UnreadableCode(f"{self._code.co_qualname} has the instruction {name}")
            handler(instruction, state)

    def _add(self, instruction: dis.Instruction, state: StackState) -> None:
        """Put values into a container that is further down."""
        name, stack, depth = instruction.opname, state.stack, instruction.arg or 1
        values = pop_many(stack, ADDS[name])
        if len(stack) >= depth:
            if name not in ("LIST_APPEND", "SET_ADD", "MAP_ADD"):
                values = [item(value) for value in values]
            stack[-depth] = box(*values, item(stack[-depth])) | stack[-depth]

    def _action(self, instruction: dis.Instruction, action: Action, place: int = 0) -> None:
        self.actions[instruction.offset, place] = action

    def load(self, instruction: dis.Instruction, value: Value, place: int = 0) -> Value:
        if any(atom[0] not in ("fresh", "const", "param") for atom in value):
            self._action(instruction, Action("load", value), place)
        return value

    # names and constants

    def _load_const(self, instruction: dis.Instruction, state: StackState) -> None:
        constant = instruction.argval
        is_kept = isinstance(constant, (str, CodeType, tuple))
        state.stack.append(frozenset((("const", constant),)) if is_kept else FRESH)

    def _return_const(self, instruction: dis.Instruction, state: StackState) -> None:
        self.summary.returns |= FRESH

    def _load_global(self, instruction: dis.Instruction, state: StackState) -> None:
        value = self.load(instruction, frozenset((("global", instruction.argval),)))
        has_null = bool((instruction.arg or 0) & 1)  # for a call; before the function until 3.13
        values = [NOTHING, value] if has_null else [value]
        state.stack.extend(values if sys.version_info < (3, 13) else values[::-1])

    def _load_name(self, instruction: dis.Instruction, state: StackState) -> None:
        mine = state.variables.get(instruction.argval, NOTHING)
        outside: Value = frozenset((("global", instruction.argval),))
        state.stack.append(mine or self.load(instruction, outside))

    def _store_name(self, instruction: dis.Instruction, state: StackState) -> None:
        state.variables[instruction.argval] = pop(state.stack)

    def _delete_name(self, instruction: dis.Instruction, state: StackState) -> None:
        state.variables.pop(instruction.argval, None)

    def _load_deref(self, instruction: dis.Instruction, state: StackState) -> None:
        kind = "cell" if instruction.argval in self._code.co_cellvars else "free"
        state.stack.append(self.load(instruction, frozenset(((kind, instruction.argval),))))

    def _load_classderef(self, instruction: dis.Instruction, state: StackState) -> None:
        self._load_deref(instruction, state)

    def _load_from_dict_or_deref(self, instruction: dis.Instruction, state: StackState) -> None:
        pop(state.stack)
        self._load_deref(instruction, state)

    def _load_from_dict_or_globals(self, instruction: dis.Instruction, state: StackState) -> None:
        pop(state.stack)
        self._load_name(instruction, state)

    def _store_deref(self, instruction: dis.Instruction, state: StackState) -> None:
        name, value = instruction.argval, pop(state.stack)
        if name in self._code.co_cellvars:
            self.summary.cells[name] = self.summary.cells.get(name, NOTHING) | value
        else:
            self._action(instruction, Action("rebind", FRESH, name, value))

    def _delete_deref(self, instruction: dis.Instruction, state: StackState) -> None:
        if instruction.argval not in self._code.co_cellvars:
            self._action(instruction, Action("rebind", FRESH, instruction.argval))

    def _store_global(self, instruction: dis.Instruction, state: StackState) -> None:
        global_: Value = frozenset((("global", instruction.argval),))
        value = pop(state.stack)
        self._action(instruction, Action("rebind", global_, instruction.argval, value))

    def _delete_global(self, instruction: dis.Instruction, state: StackState) -> None:
        state.stack.append(FRESH)
        self._store_global(instruction, state)

    def _import_name(self, instruction: dis.Instruction, state: StackState) -> None:
        names, _ = pop(state.stack), pop(state.stack)
        has_names = any(atom[0] == "const" for atom in names)
        atom = ("import", instruction.argval, has_names)
        state.stack.append(self.load(instruction, frozenset((atom,))))

    def _import_from(self, instruction: dis.Instruction, state: StackState) -> None:
        value = attribute(state.stack[-1], instruction.argval)
        state.stack.append(self.load(instruction, value))

    # attributes and items

    def _load_attr(self, instruction: dis.Instruction, state: StackState) -> None:
        value = attribute(pop(state.stack), instruction.argval)
        state.stack.append(self.load(instruction, value))
        if dis.stack_effect(instruction.opcode, instruction.arg) > 0:
            state.stack.append(NOTHING)

    def _load_method(self, instruction: dis.Instruction, state: StackState) -> None:
        self._load_attr(instruction, state)

    def _load_super_attr(self, instruction: dis.Instruction, state: StackState) -> None:
        mine = pop_many(state.stack, 3)[-1]
        value = attribute(super_of(mine), instruction.argval)
        state.stack.append(self.load(instruction, value))
        if (instruction.arg or 0) & 1:
            state.stack.append(NOTHING)

    def _store_attr(self, instruction: dis.Instruction, state: StackState) -> None:
        target, value = pop(state.stack), pop(state.stack)
        self._action(instruction, Action("write", target, instruction.argval, value))

    def _delete_attr(self, instruction: dis.Instruction, state: StackState) -> None:
        self._action(instruction, Action("write", pop(state.stack), instruction.argval))

    def _store_subscr(self, instruction: dis.Instruction, state: StackState) -> None:
        value, target, _ = pop_many(state.stack, 3)
        self._action(instruction, Action("write", target, "", value))

    def _store_slice(self, instruction: dis.Instruction, state: StackState) -> None:
        value, target, *_ = pop_many(state.stack, 4)
        self._action(instruction, Action("write", target, "", item(value)))

    def _delete_subscr(self, instruction: dis.Instruction, state: StackState) -> None:
        target, _ = pop_many(state.stack, 2)
        self._action(instruction, Action("write", target, ""))

    def _binary_subscr(self, instruction: dis.Instruction, state: StackState) -> None:
        target, _ = pop_many(state.stack, 2)
        state.stack.append(self.load(instruction, item(target)))

    def _binary_slice(self, instruction: dis.Instruction, state: StackState) -> None:
        target, *_ = pop_many(state.stack, 3)
        state.stack.append(self.load(instruction, item(target)) | box(item(target)))

    def _binary_op(self, instruction: dis.Instruction, state: StackState) -> None:
        left, right = pop_many(state.stack, 2)
        if instruction.argrepr.endswith("="):
            self._action(instruction, Action("augment", left))
            state.stack.append(left | FRESH)
        else:
            state.stack.append(box(*(item(one) for one in (left, right) if has_box(one))))

    # containers

    def _build(self, instruction: dis.Instruction, state: StackState) -> None:
        state.stack.append(box(*pop_many(state.stack, instruction.arg or 0)))

    _build_list = _build_tuple = _build_set = _build_string = _build_slice = _build

    def _build_map(self, instruction: dis.Instruction, state: StackState) -> None:
        state.stack.append(box(*pop_many(state.stack, 2 * (instruction.arg or 0))))

    def _build_const_key_map(self, instruction: dis.Instruction, state: StackState) -> None:
        pop(state.stack)
        self._build(instruction, state)

    def _format_value(self, instruction: dis.Instruction, state: StackState) -> None:
        pop_many(state.stack, 1 + bool((instruction.arg or 0) & 4))
        state.stack.append(FRESH)

    def _unpack_sequence(self, instruction: dis.Instruction, state: StackState) -> None:
        part = self.load(instruction, item(pop(state.stack)))
        state.stack.extend([part] * (instruction.arg or 0))

    def _unpack_ex(self, instruction: dis.Instruction, state: StackState) -> None:
        part, arg = item(pop(state.stack)), instruction.arg or 0
        before, after = arg & 0xFF, arg >> 8
        state.stack.extend([*[part] * after, box(part), *[part] * before])

    # the stack itself

    def _push_null(self, instruction: dis.Instruction, state: StackState) -> None:
        state.stack.append(NOTHING)

    def _copy(self, instruction: dis.Instruction, state: StackState) -> None:
        depth = instruction.arg or 1
        state.stack.append(state.stack[-depth] if len(state.stack) >= depth else FRESH)

    def _swap(self, instruction: dis.Instruction, state: StackState) -> None:
        depth, stack = instruction.arg or 1, state.stack
        if len(stack) >= depth:
            stack[-1], stack[-depth] = stack[-depth], stack[-1]

    def _end_for(self, instruction: dis.Instruction, state: StackState) -> None:
        pop_many(state.stack, -dis.stack_effect(instruction.opcode))

    def _return_value(self, instruction: dis.Instruction, state: StackState) -> None:
        self.summary.returns |= pop(state.stack)

    # functions and calls

    def _make_function(self, instruction: dis.Instruction, state: StackState) -> None:
        code, flags = pop(state.stack), instruction.arg or 0
        extra = pop_many(state.stack, flags.bit_count())
        [atom] = code
        defaults = box(*extra[: (flags & 3).bit_count()])
        self.summary.made[instruction.offset] = Made(atom[1], defaults)
        state.stack.append(frozenset((("made", instruction.offset),)))

    def _set_function_attribute(self, instruction: dis.Instruction, state: StackState) -> None:
        function, value = pop(state.stack), pop(state.stack)
        state.stack.append(function)
        if (instruction.arg or 0) & 3:
            for _, number in function:
                made = self.summary.made[number]
                self.summary.made[number] = Made(made.code, made.defaults | value)

    def _call_intrinsic_1(self, instruction: dis.Instruction, state: StackState) -> None:
        value = pop(state.stack)  # as it is for a list that becomes a tuple
        state.stack.append(box(item(value)))

    def _before_with(self, instruction: dis.Instruction, state: StackState) -> None:
        manager = pop(state.stack)
        for place, name in enumerate(("__enter__", "__exit__")):
            called = attribute(manager, name)
            number = 2 * instruction.offset + place
            self._action(instruction, Action("call", called, result=number), place)
        entered: Value = frozenset((("call", 2 * instruction.offset),))
        state.stack.extend([FRESH, entered | manager])

    _before_async_with = _before_with

    def _kw_names(self, instruction: dis.Instruction, state: StackState) -> None:
        self._keywords = instruction.argval or ()
        if not isinstance(self._keywords, tuple):
            self._keywords = self._code.co_consts[instruction.arg or 0]

    def _call(self, instruction: dis.Instruction, state: StackState) -> None:
        args = pop_many(state.stack, instruction.arg or 0)
        self._finish_call(instruction, state, args, self._keywords)
        self._keywords = ()

    def _call_kw(self, instruction: dis.Instruction, state: StackState) -> None:
        names: Iterable[Any] = [atom[1] for atom in pop(state.stack) if atom[0] == "const"]
        args = pop_many(state.stack, instruction.arg or 0)
        self._finish_call(instruction, state, args, tuple(*names))

    def _finish_call(
        self,
        instruction: dis.Instruction,
        state: StackState,
        args: list[Value],
        keywords: tuple[str, ...],
    ) -> None:
        lower, upper = pop_many(state.stack, 2)
        if lower and upper:  # a function and the first of its arguments
            callee, args = lower, [upper, *args]
        else:
            callee = lower or upper
        count = len(args) - len(keywords)
        named = tuple(zip(keywords, args[count:], strict=True))
        if callee == frozenset((("global", "super"),)):
            first = parameters(self._code)[:1]
            mine = args[1] if len(args) > 1 else frozenset(("param", name) for name in first)
            state.stack.append(super_of(mine))
            return
        self._called(
            instruction, state, Action("call", callee, "", NOTHING, tuple(args[:count]), named)
        )

    def _call_function_ex(self, instruction: dis.Instruction, state: StackState) -> None:
        has_keywords = (instruction.arg or 0) & 1
        spread = tuple(pop_many(state.stack, 1 + has_keywords))
        lower, upper = pop_many(state.stack, 2)
        self._called(instruction, state, Action("call", lower | upper, spread=spread))

    def _called(self, instruction: dis.Instruction, state: StackState, action: Action) -> None:
        number = 2 * instruction.offset
        self._action(
            instruction,
            Action(
                "call",
                action.target,
                "",
                NOTHING,
                action.args,
                action.kwargs,
                action.spread,
                number,
            ),
        )
        state.stack.append(frozenset((("call", number),)))
