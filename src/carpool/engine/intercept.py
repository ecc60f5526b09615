"""Intercept the heavy methods of a pipeline's modules.

While an `Interception` is installed, calling `transformer.forward`, `vae.decode`, ... inside a
fiber parks the fiber with a `Call` instead of running the method. Outside of fibers, and so inside
the forward that the engine itself runs, the methods work as before.

The methods are replaced on the instance, because pipelines read attributes of the module
(`.config`, `.dtype`) and a wrapped module would have to fake them all. `forward` itself is left
alone, because hooks of diffusers and accelerate set and remove it at run time; instead the engine
replaces `_compiled_call_impl`, which `Module.__call__` runs first.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from msgspec import Struct
from torch import nn

from carpool.engine.fiber import current_context, in_fiber, park
from carpool.engine.foreign_code import foreign_parts, is_of_a_library
from carpool.engine.language.parts import PREFILL, PartRead, called_parts, towers_of
from carpool.engine.lora_scale import idle_scale
from carpool.engine.row_mixing import mixes_rows
from carpool.engine.specs import SPECS, Spec
from carpool.engine.specs.plugins import spec_of
from carpool.request.lora import AdapterScales
from carpool.types import Phase, phase_of

if TYPE_CHECKING:  # it imports transformers
    from carpool.engine.language.prompt import PromptReading
    from carpool.engine.language.tokens import PackedTokens

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Target:
    """An intercepted method."""

    component: str  # the pipeline's name for the module
    module: nn.Module
    method: str
    original: Callable[..., Any]
    positional: tuple[str, ...]  # parameter names in order
    phase: Phase
    spec: Spec | None  # None: calls of this method run alone
    defaults: Mapping[str, Any] = field(default_factory=dict)  # optional parameters'
    is_exclusive: bool = False  # runs in the state of one request: see `isolation.py`
    is_doubted: bool = False  # its code is not the code its table was written for: prove first
    modes: str = ""  # torch modes in effect, where they are not the default
    idle_scale: str = ""  # attention kwargs whose scale changes no layer: no PEFT layers


class Call(Struct, frozen=True, eq=False):
    """One method call that a fiber is parked on."""

    target: Target
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    lora: AdapterScales = ()  # the adapters of its request

    def arguments(self) -> dict[str, Any]:
        """All arguments by name."""
        return {**dict(zip(self.target.positional, self.args, strict=False)), **self.kwargs}


@dataclass(frozen=True, slots=True)
class Inside:
    """Stands for an answer that the fiber computes itself, in its own state."""

    run: Callable[[], Any]


def methods_of(module: nn.Module) -> list[str]:
    """The heavy methods of a pipeline component.

    An autoencoder is called through `encode` and `decode`, CLAP through `get_text_features`. A text
    generator is intercepted at each token: `generate` is the name of those calls.
    """
    names = ("encode", "decode", "get_text_features")
    methods = [name for name in names if callable(getattr(module, name, None))]
    methods = methods or ["forward"]
    can_generate = getattr(module, "can_generate", None)
    if callable(can_generate) and can_generate():
        methods.append("generate")
    return methods


def _called_layers(module: nn.Module) -> Iterable[nn.Module]:
    """Layers of a text encoder that its pipeline calls one by one, as Ideogram 4 does."""
    if type(module).__name__ != "Qwen3VLModel":
        return ()
    return cast("nn.ModuleList", module.get_submodule("language_model.layers"))


class Interception:
    """The intercepted methods of one pipeline's modules.

    Args:
        reader_of: reads the calls of a text generator; None: its tokens run alone.
    """

    def __init__(
        self,
        components: Mapping[str, Any],
        reader_of: Callable[[nn.Module], "PackedTokens | None"] = lambda module: None,
    ) -> None:
        self._reader_of = reader_of
        self.targets: list[Target] = []
        self._replaced: list[tuple[nn.Module, str, Any]] = []
        self._installed: list[tuple[Target, dict[str, Any], str, Callable[..., Any]]] = []
        visited: set[int] = set()
        for component, module in components.items():
            if not isinstance(module, nn.Module) or id(module) in visited:
                continue
            visited.add(id(module))
            for method in methods_of(module):
                self.targets.append(_target(component, module, method))
            for index, layer in enumerate(_called_layers(module)):
                self.targets.append(_target(f"{component}.{index}", layer, "forward"))

    def install(self) -> None:
        writers = {id(t.module): t for t in self.targets if t.method == "generate"}
        readers = {place: self._reader_of(writer.module) for place, writer in writers.items()}
        owners = {id(part): t for t in writers.values() for part in called_parts(t.module)}
        owners |= writers
        for target in self.targets:
            owner = owners.get(id(target.module))
            reader = None if owner is None else readers[id(owner.module)]
            if owner is not target:
                token = owner
                if owner is not None and owner.module is not target.module:  # in Ideogram 4
                    token = _target(owner.component, owner.module, "generate", target.module)
                method = _parking(target.original, target, token, reader)
                self._replace(target, target.module, method, target.method)
                continue
            self._replace(target, target.module, _generating(target.module), "generate")
            self._replace(target, target.module, _uncompiled(target.module), "get_compiled_call")
            if reader is not None:
                token = _target(target.component, target.module, "generate", reader.decoder)
                method = _parking_packed(token, reader, _direct(target, reader.decoder))
                self._replace(target, reader.decoder, method)
                if (head := reader.head) is not None:
                    logits = replace(
                        _target(target.component, head, "forward"), method="logits",
                        phase=target.phase, spec=reader.of_head,
                    )  # fmt: skip
                    method = _parking(logits.original, None, logits, None, component=target.module)
                    self._replace(target, head, method)
            for part in (target.module, *called_parts(target.module)):
                if not any(part is module for module, _, _ in self._replaced):
                    call = _target(target.component, target.module, "generate", part)
                    method = _parking(call.original, _direct(target, part), call, reader)
                    self._replace(target, part, method)
            for tower in towers_of(target.module):
                if not any(tower is module for module, _, _ in self._replaced):
                    call = _target(f"{target.component}.tower", tower, "forward")
                    method = _parking(call.original, replace(call, phase=target.phase), None, None)
                    self._replace(target, tower, method)

    def _replace(
        self, target: Target, module: nn.Module, method: Callable[..., Any], name: str = "forward"
    ) -> None:
        attributes = module.__dict__
        name = "_compiled_call_impl" if name == "forward" else name
        self._replaced.append((module, name, attributes.get(name, _ABSENT)))
        attributes[name] = method
        self._installed.append((target, attributes, name, method))

    def check(self) -> None:
        """Raise if other code has replaced a method: its calls would bypass the engine.

        Raises:
            RuntimeError: names the method.
        """
        for target, attributes, name, installed in self._installed:
            if attributes.get(name) is not installed:
                raise RuntimeError(
                    f"{target.component}.{target.method} was replaced while an engine runs it: "
                    "compile and hook modules before they are loaded"
                )

    def remove(self) -> None:
        """Restore every module to its state before `install`. Harmless when not installed."""
        while self._replaced:
            module, method, before = self._replaced.pop()
            if before is _ABSENT:
                del module.__dict__[method]
            else:
                module.__dict__[method] = before
        self._installed.clear()


def is_compiled(module: nn.Module) -> bool:
    """Whether a module was compiled as a whole, intercepted or not."""
    call = vars(module).get("_compiled_call_impl")
    call = getattr(call, "intercepted", call)
    return call is not None and call != module._call_impl


def computes_together(module: nn.Module) -> bool:
    """Whether several processes run each forward of it: see `engine.group`."""
    return getattr(vars(module).get("forward"), "leads", False)


def tell_of_compilations(
    modules: Iterable[nn.Module], begins: Callable[[], None], ends: Callable[[], None]
) -> Callable[[], None]:
    """Call functions when torch compiles code, if any part of the modules is compiled.

    Returns:
        A function that stops the notifications.
    """
    if not any(is_compiled(part) for module in modules for part in module.modules()):
        return lambda: None
    from torch._dynamo.callback import callback_handler as handler  # takes a second to import

    begun = handler.register_start_callback(lambda _: begins())
    ended = handler.register_end_callback(lambda _: ends())

    def remove() -> None:
        handler.remove_start_callback(begun)
        handler.remove_end_callback(ended)

    return remove


def _target(
    component: str, module: nn.Module, method: str, part: nn.Module | None = None
) -> Target:
    """A method of a component; `generate` stands for each token's call of a part."""
    part = part or module
    is_forward = method in ("forward", "generate")
    original = signed = part.forward if is_forward else getattr(module, method)
    if is_forward:  # same choice as `Module.__call__`
        original = part._compiled_call_impl or part._call_impl
    parameters = list(inspect.signature(signed).parameters.values())
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    is_foreign = (type(module).__name__, method) in SPECS and not is_of_a_library(type(module))
    return Target(
        component=component,
        module=module,
        method=method,
        original=original,
        positional=tuple(positional),
        phase=phase_of(component, method),
        spec=None if takes_any else spec_of(type(module).__name__, method),
        defaults={p.name: p.default for p in parameters if p.default is not p.empty},
        is_exclusive=mixes_rows(module) is not None,
        is_doubted=is_foreign or next(foreign_parts(module), None) is not None,
        idle_scale=idle_scale(module) if method == "forward" else "",
    )


def _parking(
    original: Callable[..., Any],
    target: Target | None,
    token: Target | None,
    reader: "PackedTokens | None",
    component: nn.Module | None = None,
) -> Callable[..., Any]:
    """Wrap a method so that it parks when called in a fiber.

    Args:
        target: the method as a target; None: it runs where it is called.
        token: the target to use instead while its component generates text.
        reader: the text generator's reader: a token that can be packed parks further inside.
        component: the text generator; default: the module of `token`.
    """
    if component is None and token is not None:
        component = token.module

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        context = current_context()
        if context is None:
            if target is None or not in_fiber():
                return original(*args, **kwargs)
            return park(Call(target, args, kwargs))
        if context.is_running:
            return original(*args, **kwargs)
        called = token if token and context.is_generating(component) else target
        if called is None:
            return original(*args, **kwargs)
        if called is token and reader is not None:
            if reader.parks_inside(kwargs):
                return original(*args, **kwargs)
            if not args and context.reads_in_parts:
                with reader.reading(called.module, kwargs) as prompt:
                    if prompt is not None:
                        return _read(prompt, original, called.component, context)
        return _parked(Call(context.own(called), args, kwargs))

    method.intercepted = original  # type: ignore[attr-defined]
    return method


def _parked(call: Call) -> Any:
    answer = park(call)
    return answer.run() if isinstance(answer, Inside) else answer


def _read(
    prompt: "PromptReading", forward: Callable[..., Any], component: str, context: Any
) -> Any:
    """Read a prompt, in as many calls as the time of others asks for; the answer of the last.

    The model's forward runs in the fiber, and its decoder parks.
    """
    while True:
        left = prompt.tokens - prompt.read
        prompt.until = prompt.read + min(left, context.prompt_part(component, left))
        with suppress(PartRead):
            return forward(**prompt.part())


def _direct(owner: Target, part: nn.Module) -> Target | None:
    """The inner model of a text generator, which MiniMax-H3 and MiniMax Music 3 call."""
    is_inner = part is getattr(owner.module, "model", None)
    return _target(f"{owner.component}.model", part, "forward") if is_inner else None


def _parking_packed(
    token: Target, reader: "PackedTokens", direct: Target | None
) -> Callable[..., Any]:
    """The forward of a language model's layers, wrapped to park in fibers during generation.

    Calls of one token share forwards, and so do parts of prompts.
    """
    decoder, original, component = reader.decoder, token.original, token.module
    has_foreign_code = not is_of_a_library(type(decoder)) or token.is_doubted
    run, packs_prompts = reader.run(original), reader.packs_prompts and not has_foreign_code
    packed = {
        (rows, method, is_prompt): replace(
            token, module=decoder, method=method, original=run, positional=(), defaults={},
            spec=spec if packs_prompts or not is_prompt else None, is_doubted=has_foreign_code,
        )
        for rows, spec in reader.specs.items()
        for method, is_prompt in (("generate", False), ("generate", True), (PREFILL, True))
    }  # fmt: skip

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        context = current_context()
        if context is None or context.is_running:
            return original(*args, **kwargs)
        if not context.is_generating(component):
            if direct is None:
                return original(*args, **kwargs)
            return _parked(Call(context.own(direct), args, kwargs))
        arguments = Call(token, args, kwargs).arguments()
        prompt, packed_kwargs = reader.prompt_in(arguments), reader.packable(arguments)
        name = "generate" if prompt is None or prompt.is_last else PREFILL
        if packed_kwargs is None:
            run_part = prompt and functools.partial(prompt.run, original)
            part = run_part and replace(token, method=name, original=run_part)
            answer = _parked(Call(context.own(part or token), args, kwargs))
        else:
            rows = "input_ids" if "input_ids" in packed_kwargs else "inputs_embeds"
            target = context.own(packed[rows, name, prompt is not None])
            answer = _parked(Call(target, (), packed_kwargs))
        if name == PREFILL or answer is None:  # None: a longer prefix is cached by now
            raise PartRead
        return answer if packed_kwargs is None else packed_kwargs["past_key_values"].whole(answer)

    method.intercepted = original  # type: ignore[attr-defined]
    return method


def _generating(module: nn.Module) -> Callable[..., Any]:
    original: Any = module.generate

    @functools.wraps(original)
    def generate(*args: Any, **kwargs: Any) -> Any:
        context = current_context()
        if context is None or context.is_running:
            return original(*args, **kwargs)
        with context.generating(module):
            options = kwargs if context.watch is None else context.watch(module, kwargs)
            return original(*args, **options)

    return generate


def _uncompiled(module: nn.Module) -> Callable[..., Any]:
    """Replace transformers' compiled call for each token: compiled code cannot pause."""
    original: Any = getattr(module, "get_compiled_call", None)

    def get_compiled_call(*args: Any, **kwargs: Any) -> Any:
        return module.__call__ if in_fiber() else original(*args, **kwargs)

    return get_compiled_call
