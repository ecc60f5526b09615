"""The instructions of CPython 3.11 to 3.13 that move values, and the state that they change."""

import dis
import inspect
from dataclasses import dataclass
from types import CodeType
from typing import Any

from carpool.engine.reach.summary import FRESH, NOTHING, Value

# instructions that take values from the stack and leave new ones: (taken, left)
PLAIN: dict[str, tuple[int, int]] = {
    **dict.fromkeys(
        [
            *("NOP", "RESUME", "CACHE", "PRECALL", "EXTENDED_ARG", "COPY_FREE_VARS", "MAKE_CELL"),
            *("SETUP_ANNOTATIONS", "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"),
            *("RETURN_GENERATOR", "ASYNC_GEN_WRAP", "RAISE_VARARGS", "RERAISE"),
        ],
        (0, 0),
    ),
    **dict.fromkeys(
        [
            *("UNARY_NOT", "UNARY_NEGATIVE", "UNARY_INVERT", "UNARY_POSITIVE", "TO_BOOL"),
            *("FORMAT_SIMPLE", "CONVERT_VALUE", "YIELD_VALUE", "SEND", "CHECK_EXC_MATCH"),
        ],
        (1, 1),
    ),
    **dict.fromkeys(
        [
            *("COMPARE_OP", "IS_OP", "CONTAINS_OP", "FORMAT_WITH_SPEC", "CHECK_EG_MATCH"),
            *("PREP_RERAISE_STAR", "CALL_INTRINSIC_2", "END_SEND"),
        ],
        (2, 1),
    ),
    **dict.fromkeys(
        ["POP_TOP", "POP_EXCEPT", "PRINT_EXPR", "IMPORT_STAR", "END_ASYNC_FOR"], (1, 0)
    ),
    **dict.fromkeys(
        [
            *("LOAD_ASSERTION_ERROR", "LOAD_BUILD_CLASS", "LOAD_CLOSURE", "LOAD_LOCALS", "GET_LEN"),
            *("GET_ANEXT", "PUSH_EXC_INFO", "WITH_EXCEPT_START", "MATCH_SEQUENCE", "MATCH_MAPPING"),
            "MATCH_KEYS",
        ],
        (0, 1),
    ),
    "CLEANUP_THROW": (3, 2),
    "MATCH_CLASS": (3, 1),
}
ENDS = {
    *("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "JUMP_FORWARD"),
    *("JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "INTERPRETER_EXIT"),
}
SAME = {"GET_ITER", "GET_YIELD_FROM_ITER", "GET_AWAITABLE", "GET_AITER", "LIST_TO_TUPLE"}
LOCALS = {
    *("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_AND_CLEAR", "LOAD_FAST_LOAD_FAST"),
    *("STORE_FAST", "STORE_FAST_MAYBE_NULL", "STORE_FAST_STORE_FAST", "STORE_FAST_LOAD_FAST"),
    "DELETE_FAST",
}
ADDS = {"LIST_APPEND": 1, "SET_ADD": 1, "LIST_EXTEND": 1, "SET_UPDATE": 1, "DICT_UPDATE": 1,
         "DICT_MERGE": 1, "MAP_ADD": 2}  # fmt: skip


_MOST_ATOMS = 1000


class UnreadableCode(Exception):
    """Code that this reader does not understand."""


@dataclass(slots=True)
class StackState:
    """What the stack and the variables may hold before an instruction."""

    stack: list[Value]
    variables: dict[str, Value]

    def copy(self) -> "StackState":
        return StackState([*self.stack], dict(self.variables))

    def merge(self, other: "StackState") -> bool:
        """Take in what another way to the same instruction brings; whether that is anything new."""
        is_new = False
        for i in range(min(len(self.stack), len(other.stack))):
            both = _few(self.stack[-1 - i] | other.stack[-1 - i])
            if both != self.stack[-1 - i]:
                self.stack[-1 - i], is_new = both, True
        for name, value in other.variables.items():
            both = _few(self.variables.get(name, NOTHING) | value)
            if both != self.variables.get(name, NOTHING):
                self.variables[name], is_new = both, True
        return is_new


def _few(value: Value) -> Value:
    if len(value) > _MOST_ATOMS:
        raise UnreadableCode(f"a variable may be more than {_MOST_ATOMS} things")
    return value


def parameters(code: CodeType) -> list[str]:
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return list(code.co_varnames[:count])


def super_of(mine: Value) -> Value:
    return frozenset(("superof", atom) for atom in mine) or FRESH


def has_box(value: Value) -> bool:
    return any(atom[0] == "box" for atom in value)


def jumps(instruction: dis.Instruction) -> bool:
    return instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs


def move_variables(name: str, argval: Any, state: StackState) -> None:
    names = argval if isinstance(argval, tuple) else (argval,)
    verbs = [word for word in name.split("_") if word in ("LOAD", "STORE", "DELETE")]
    for verb, variable in zip(verbs, names, strict=True):
        if verb == "LOAD":
            state.stack.append(state.variables.get(variable, FRESH))
        elif verb == "STORE":
            state.variables[variable] = pop(state.stack)
        else:
            state.variables.pop(variable, None)


def pop(stack: list[Value]) -> Value:
    return stack.pop() if stack else FRESH


def pop_many(stack: list[Value], count: int) -> list[Value]:
    """The topmost values, in the order in which they were pushed."""
    return [pop(stack) for _ in range(count)][::-1]
