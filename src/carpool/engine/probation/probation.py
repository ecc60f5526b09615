"""Proof at run time that calls fuse: the first forwards also run apart, and bits are compared.

On probation are guessed tables (`infer.py`), all tables in exact numerics, and tables of modules
with code unknown to the table's author (`foreign_code`). On probation, calls run one by one, which
answers them, and then once more as one forward in exact numerics, where any mixing of rows shows
as a difference, however small. Agreement is evidence for the forward's kind (flags and types of the
calls), its sizes, its numbers of rows, and the arguments that differed between its calls. A forward
is trusted when its kind has agreed `QUORUM` times, and there is evidence for all of these
properties. One disagreement, or an exception that does not happen alone, refutes a guess: the next
guess is tried, if there is one, else the kind always runs alone.

Equal bits do not prove everything. So a kind also runs alone if its forward keeps state on the
module, changes its inputs, draws random numbers, returns tensors that share memory with its inputs
or weights, branches on values of some rows, or reads only some rows.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from msgspec import structs

from carpool.engine.containment import UNCONTAINED
from carpool.engine.execute import Failure, Ready, RunCalls
from carpool.engine.fuse import Fuser
from carpool.engine.intercept import Call, Target
from carpool.engine.language.parts import WRITING
from carpool.engine.nested import tensors_in
from carpool.engine.numerics import is_followed
from carpool.engine.probation.guesses import (
    Fused,
    deviation_of,
    differing_guess,
    equal_guesses,
    is_guess,
    with_own_lists,
)
from carpool.engine.probation.kinds import QUORUM, Evidence, Kind, kind_of, width
from carpool.engine.probation.snapshot import (
    ModuleSnapshot,
    module_tensors,
    shares_memory,
    storages,
    versions,
)
from carpool.engine.probation.verdicts import Verdicts
from carpool.engine.serialization import copied
from carpool.engine.specs.infer import covers, infer
from carpool.errors import named

log = logging.getLogger("carpool")

MAX_UNSETTLED = 4  # consecutive forwards, as caches fill in the first ones; then it runs alone
MAX_KNOWN = 4096


class Probation:
    """Decides which calls may fuse, and collects evidence. The engine's thread only.

    Args:
        fuser: describes and joins calls.
        infers: guess tables for classes without one.
        without_caches: the pipeline reads no key-value caches: do not compute them.
        verdicts: stores evidence between runs.
    """

    def __init__(
        self,
        fuser: Fuser,
        *,
        infers: bool,
        verdicts: Verdicts | None = None,
        without_caches: bool = False,
    ) -> None:
        self._fuser, self._infers, self._without_caches = fuser, infers, without_caches
        self._verdicts = verdicts or Verdicts(None)
        self._evidence: dict[tuple[str, str], Evidence] = {}  # keyed by class identity and kind
        self._kinds: dict[Any, tuple[Kind, Evidence]] = {}  # keyed by fuse key
        # second guesses: by module and method, then by the kind of the first guess
        self._second: dict[tuple[int, str], dict[str, frozenset[str]]] = {}
        self._tables: dict[tuple[str, str], str] = {}  # how methods fuse, by component and method
        self.forwards = {"agreed": 0, "differed": 0, "unsettled": 0}

    def infer_spec(self, call: Call) -> Call:
        """The call with a guessed table, if possible.

        For a class without a table, or a table without a rule for a tensor of this call.
        """
        target = call.target
        if target.spec is not None and covers(target.spec, call.arguments()):
            if not target.is_doubted:
                self._tables.setdefault((target.component, target.method), "table")
            return call
        is_named = len(call.args) <= len(target.positional)
        if not self._infers or target.method in WRITING or not is_named:
            return call
        guessed = self._guessed(call, ())
        if guessed is None:
            return call
        if second := self._second.get((id(target.module), target.method)):
            shared = second.get(kind_of(guessed, is_exact=self._fuser.is_exact).text)
            guessed = guessed if shared is None else self._guessed(call, shared) or guessed
        return guessed

    def runs_alone(self, call: Call, key: Any) -> bool:
        """Whether calls of this key are known not to fuse."""
        if not self.is_tried(call.target) or not isinstance(key, tuple):
            return False
        return self._of(call, key)[1].alone is not None

    def is_trusted(self, ready: Sequence[Ready]) -> bool:
        """Whether a forward of these calls needs no second one as proof."""
        if len(ready) == 1 or not self.is_tried(ready[0].call.target):
            return True
        calls, rows = [member.call for member in ready], [member.rows for member in ready]
        kind, evidence = self._of(calls[0], ready[0].key)
        return evidence.alone is None and self._covers(kind, evidence, calls, rows)

    def around(self, run: RunCalls, fused: Fused) -> RunCalls:
        """Wrap a forward so that it proves itself first.

        Args:
            run: runs the forward that answers.
            fused: runs another one in the given mode, to compare with.
        """

        def proven(ready: Sequence[Ready]) -> list[Any]:
            if len(ready) == 1 or self.is_trusted(ready):
                return run(ready)
            kind, evidence = self._of(ready[0].call, ready[0].key)
            return self._prove(kind, evidence, ready, run, fused)

        return proven

    def report(self) -> list[dict[str, Any]]:
        """How each method fuses: by table, proven, on probation or alone, and why."""
        lines = [
            {"call": f"{component}.{method}", "fuses": how, "why": ""}
            for (component, method), how in sorted(self._tables.items())
        ]
        for (_, kind), evidence in sorted(self._evidence.items()):
            how, why = evidence.status
            lines.append({"call": kind.split("(")[0], "kind": kind, "fuses": how, "why": why})
        return lines

    def statistics(self) -> dict[str, Any]:
        """Forwards on probation by result, and kinds by status."""
        fuses = [line["fuses"] for line in self.report()]
        states = ("table", "proven", "probation", "alone")
        return {"forwards": dict(self.forwards), "kinds": {s: fuses.count(s) for s in states}}

    def keep(self) -> None:
        """Store the evidence if it has changed."""
        self._verdicts.keep({p: e for p, e in self._evidence.items() if not e.unsettled})

    def _guessed(self, call: Call, shared: Collection[str]) -> Call | None:
        spec = infer(call.arguments(), shared)
        if spec is None:
            return None
        if self._without_caches and _may_go_without_cache(call):
            spec = replace(spec, adds={"use_cache": False})
        return structs.replace(call, target=replace(call.target, spec=spec))

    def is_tried(self, target: Target) -> bool:
        """Whether calls of a target are on probation."""
        return target.spec is not None and (is_guess(target) or self._fuser.is_exact)

    def _of(self, call: Call, key: Any) -> tuple[Kind, Evidence]:
        module = call.target.module
        kind_and_evidence = self._kinds.get((key, bool(call.lora), module.training))
        if kind_and_evidence is not None and kind_and_evidence[0].module == id(module):
            return kind_and_evidence
        if len(self._kinds) >= MAX_KNOWN:
            self._kinds.clear()
        kind = kind_of(call, is_exact=self._fuser.is_exact)
        place = (self._verdicts.identity(module), kind.text)
        if place not in self._evidence:
            stored = self._verdicts.read(*place)
            evidence = self._evidence[place] = Evidence() if stored is None else stored
            if evidence.shared:
                self._retry_with(call, kind, evidence.shared)
        self._kinds[key, bool(call.lora), module.training] = kind, self._evidence[place]
        return kind, self._evidence[place]

    def _retry_with(self, call: Call, kind: Kind, shared: Collection[str]) -> None:
        second = self._second.setdefault((id(call.target.module), call.target.method), {})
        second[kind.text] = frozenset(shared)

    def _covers(
        self, kind: Kind, evidence: Evidence, calls: Sequence[Call], rows: Sequence[int]
    ) -> bool:
        if evidence.agreed < QUORUM or kind.sizes not in evidence.sizes:
            return False
        if width(rows) not in evidence.widths:
            return False
        open_ = [name for name in kind.stacked if name not in evidence.varied]
        return not self._varying(calls, open_)

    def _varying(self, calls: Sequence[Call], names: Sequence[str]) -> set[str]:
        """The arguments whose content differs between calls."""
        arguments = [call.arguments() for call in calls]
        return {
            n for n in names if len({self._fuser.digests.content(v.get(n)) for v in arguments}) > 1
        }

    def _prove(
        self, kind: Kind, evidence: Evidence, ready: Sequence[Ready], run: RunCalls, fused: Fused
    ) -> list[Any]:
        """Run calls apart for their answers, and together for evidence."""
        calls, rows = [member.call for member in ready], [member.rows for member in ready]
        target = calls[0].target
        before = ModuleSnapshot.of(target.module)
        inputs = [*tensors_in([call.arguments() for call in calls])]
        before_calls, copies = versions(inputs), [with_own_lists(call) for call in calls]
        weights = list(tensors_in(module_tensors(target.module)))  # no answer may share them
        owned = storages(weights)
        answers: list[Any] = []
        why: str | None = None
        for member, call in zip(ready, calls, strict=True):
            try:
                answer = run([member])[0]
            except (torch.OutOfMemoryError, *UNCONTAINED):
                raise
            except BaseException as error:
                answers.append(Failure(error))
                continue
            if storages(answer) & owned:
                why = "returns tensors of its own, which its next call overwrites"
                answer = copied(answer)
            elif shares_memory(answer, call.arguments()):
                why = "returns views of its inputs"
            answers.append(answer)
        if evidence.alone is not None or any(isinstance(answer, Failure) for answer in answers):
            return answers
        changed = ModuleSnapshot.of(target.module).differs(before)
        if why is None and versions(inputs) != before_calls:
            why = "changes its inputs"
        draws = changed == "random" or any(member.call.target.is_exclusive for member in ready)
        if why is None and draws:  # allowed if each request draws its own: see `draws.py`
            why = "draws random numbers"
        if why is None and not is_followed(target.module):
            why = "is compiled: exact numerics cannot follow its code"
        if why is not None:
            self._give_up(kind, evidence, why)
        elif changed is not None:
            self._not_settled(kind, evidence, changed)
        else:
            try:
                self._compare(kind, evidence, copies, rows, fused, answers)
            except UNCONTAINED:
                raise
            except BaseException as error:  # a defect here: the answers are still right
                log.exception("%s could not be compared", kind.text)
                evidence.alone = f"could not be compared: {named(error)}"
        if evidence.alone is not None or evidence.agreed == QUORUM:
            self.keep()
        return answers

    def _compare(
        self,
        kind: Kind,
        evidence: Evidence,
        calls: Sequence[Call],
        rows: Sequence[int],
        fused: Fused,
        answers: Sequence[Any],
    ) -> None:
        target = calls[0].target
        varying = self._varying(calls, kind.stacked)
        calls = [_apart(call) for call in calls]
        before = ModuleSnapshot.of(target.module)
        inputs = [*tensors_in([call.arguments() for call in calls])]
        before_forward = versions(inputs)

        def deviation(calls: Sequence[Call]) -> str | None:
            return deviation_of(calls, rows, fused, answers, before)

        try:
            reason = deviation(calls)
            changed = ModuleSnapshot.of(target.module).differs(before)
            if reason and self._guess_again(kind, evidence, calls, varying, deviation):
                return
        except torch.OutOfMemoryError:
            return  # no evidence either way
        finally:
            before.restore_random()
        if reason is not None:
            self._give_up(kind, evidence, reason)
        elif versions(inputs) != before_forward:
            self._give_up(kind, evidence, "changes its inputs")
        elif changed == "random":
            self._give_up(kind, evidence, "draws random numbers")
        elif changed is not None:
            self._not_settled(kind, evidence, changed)
        else:
            evidence.agreed += 1
            evidence.unsettled = 0
            evidence.sizes.add(kind.sizes)
            evidence.widths.add(width(rows))
            evidence.varied |= varying
            self.forwards["agreed"] += 1
            if evidence.agreed == QUORUM:
                log.info("%s fuses: %d forwards gave the same bits as alone", kind.text, QUORUM)

    def _not_settled(self, kind: Kind, evidence: Evidence, changed: str) -> None:
        self.forwards["unsettled"] += 1
        evidence.unsettled += 1
        if evidence.unsettled >= MAX_UNSETTLED:
            self._give_up(kind, evidence, f"keeps state: {changed}")

    def _guess_again(
        self,
        kind: Kind,
        evidence: Evidence,
        calls: Sequence[Call],
        varying: Collection[str],
        deviation: Callable[[Sequence[Call]], str | None],
    ) -> bool:
        """Guess arguments to share that looked stacked by chance; returns whether one remains.

        First arguments equal in all calls, such as positions as many as there are rows: a forward
        tests these at once. Then differing ones, of which a forward may read only some rows.
        """
        spec, first = calls[0].target.spec, self._guessed(calls[0], ())
        if spec is None or not spec.is_inferred or evidence.shared or first is None:
            return False
        if first.target.spec != spec:
            return False  # this was already the second guess
        guesses = equal_guesses(spec, set(kind.stacked) - set(varying))
        shared = next((names for names in guesses if self._agrees(calls, names, deviation)), None)
        if not (shared := shared or differing_guess(spec, set(varying) - evidence.varied)):
            return False
        evidence.shared, evidence.agreed = set(shared), 0
        self._retry_with(calls[0], kind, shared)
        log.info("%s does not fuse; %s may be shared instead", kind.text, ", ".join(shared))
        return True

    def _agrees(
        self,
        calls: Sequence[Call],
        shared: Collection[str],
        deviation: Callable[[Sequence[Call]], str | None],
    ) -> bool:
        """Whether calls fuse when these arguments are shared."""
        guessed = [self._guessed(call, shared) for call in calls]
        copies = [with_own_lists(call) for call in guessed if call is not None]
        if len({self._fuser.describe(call)[0] for call in copies}) > 1:
            return False
        return deviation(copies) is None

    def _give_up(self, kind: Kind, evidence: Evidence, why: str) -> None:
        """Run such calls alone from now on."""
        self.forwards["differed"] += 1
        evidence.alone = why
        log.warning("%s runs alone from now on: %s", kind.text, why)


def _apart(call: Call) -> Call:
    """The same call with copies of the arguments that its forward changes."""
    spec = call.target.spec
    if spec is None:
        return call
    kwargs = {name: spec.rule(name).copy_of(value) for name, value in call.kwargs.items()}
    return structs.replace(call, kwargs=kwargs)


def _may_go_without_cache(call: Call) -> bool:
    """Whether a call returns a cache that it neither requested nor uses."""
    named_arguments = call.arguments().keys() & {"use_cache", "past_key_values", "return_dict"}
    return "use_cache" in call.target.positional and not named_arguments
