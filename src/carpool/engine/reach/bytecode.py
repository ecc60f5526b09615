"""Read code objects of CPython 3.11 to 3.13: an abstract run of bytecode gives a `CodeSummary`.

Every branch is taken; a variable holds the union of what the branches leave in it. An instruction
that is not known here makes the code unreadable.
"""

import dis
from functools import lru_cache
from types import CodeType

from carpool.engine.reach.effects import Effects
from carpool.engine.reach.instructions import (
    ENDS,
    StackState,
    UnreadableCode,
    jumps,
    parameters,
    pop,
)
from carpool.engine.reach.summary import FRESH, NOTHING, CodeSummary, Value, item

__all__ = ["UnreadableCode", "read"]

_MOST_BYTES, _MOST_STEPS = 100_000, 200_000


def read(code: CodeType) -> CodeSummary:
    """The summary of a code object.

    Raises:
        UnreadableCode: it has instructions of another Python, or is far too large.
    """
    summary = _read(code)
    if isinstance(summary, UnreadableCode):
        raise summary.with_traceback(None)
    return summary


@lru_cache(maxsize=4096)
def _read(code: CodeType) -> CodeSummary | UnreadableCode:
    try:
        return _Reader(code).run()
    except UnreadableCode as error:
        return error
    except Exception as error:  # of instructions that are in another order than is known here
        return UnreadableCode(f"{code.co_qualname}: {type(error).__name__}")


class _Reader:
    def __init__(self, code: CodeType) -> None:
        if len(code.co_code) > _MOST_BYTES:
            raise UnreadableCode(f"{code.co_qualname} is too large")
        self._code, self._effects = code, Effects(code)
        self._instructions = list(dis.get_instructions(code))
        self._index = {one.offset: i for i, one in enumerate(self._instructions)}
        self._handlers = [  # of exceptions: first, last, handler, depth of the stack
            (one.start, one.end, one.target, one.depth + bool(one.lasti))
            for one in dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]
        ]
        self._before: dict[int, StackState] = {}
        self._waiting: list[int] = []
        self._starts = {self._index[one.argval] for one in self._instructions if jumps(one)}
        for first, _, handler, _ in self._handlers:
            self._starts |= {self._index[first], self._index[handler]}

    def run(self) -> CodeSummary:
        start: dict[str, Value] = {
            name: frozenset((("param", name),)) for name in parameters(self._code)
        }
        summary = self._effects.summary
        for name in self._code.co_cellvars:
            summary.cells[name] = start.get(name, NOTHING)
        self._reach(0, StackState([], start))
        steps = 0
        while self._waiting:
            i = self._waiting.pop()
            state, is_first = self._before[i].copy(), True
            while True:
                steps += 1
                if steps > _MOST_STEPS:
                    raise UnreadableCode(f"{self._code.co_qualname} is too large")
                instruction = self._instructions[i]
                if is_first or "STORE" in instruction.opname:
                    self._guard(instruction, state)
                self._step(instruction, state)
                if "STORE" in instruction.opname:  # nothing else changes variables
                    self._guard(instruction, state)
                is_first = False
                i += 1
                if instruction.opname in ENDS or i >= len(self._instructions):
                    break
                if i in self._starts:
                    self._reach(i, state)
                    break
        summary.actions = [self._effects.actions[key] for key in sorted(self._effects.actions)]
        return summary

    def _reach(self, i: int, state: StackState) -> None:
        if i not in self._before:
            self._before[i] = state.copy()
            self._waiting.append(i)
        elif self._before[i].merge(state) and i not in self._waiting:
            self._waiting.append(i)

    def _guard(self, instruction: dis.Instruction, state: StackState) -> None:
        """An exception may leave the instruction for its handler."""
        for first, last, handler, depth in self._handlers:
            if first <= instruction.offset < last:
                stack = [*state.stack[:depth], *[FRESH] * (depth - len(state.stack)), FRESH]
                self._reach(self._index[handler], StackState(stack, dict(state.variables)))

    def _step(self, instruction: dis.Instruction, state: StackState) -> None:
        name = instruction.opname
        if name.startswith(("POP_JUMP", "JUMP_IF", "FOR_ITER")):
            self._branch(instruction, state)
            return
        self._effects.apply(instruction, state)
        if name == "SEND" or name.startswith("JUMP"):
            self._reach(self._index[instruction.argval], state)

    def _branch(self, instruction: dis.Instruction, state: StackState) -> None:
        stack, name = state.stack, instruction.opname
        there = self._index[instruction.argval]
        if name.startswith("POP_JUMP"):
            pop(stack)
            self._reach(there, state)
        elif name.startswith("JUMP_IF"):  # or pop
            self._reach(there, state)
            pop(stack)
        else:
            iterator = stack[-1] if stack else FRESH
            effect = dis.stack_effect(instruction.opcode, instruction.arg, jump=True)
            after = [*stack, FRESH] if effect > 0 else stack[:-1]
            self._reach(there, StackState(after, state.variables))
            stack.append(self._effects.load(instruction, item(iterator)))
