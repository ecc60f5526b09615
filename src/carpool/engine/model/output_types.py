"""Find the output types of a pipeline class, and whether it only converts between them.

Most classes pass `output_type` to their image processor, which converts. Some do more for "pil"
than for "pt": they rescale, mark or check their images (DeepFloyd IF's safety checker runs only
for "pil" and "np"). The source of the class shows it.
"""

import ast
import inspect
from collections.abc import Mapping
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

from diffusers.image_processor import VaeImageProcessor
from diffusers.video_processor import VideoProcessor

USUAL = ("pil", "np", "pt", "latent")
# Reading the sources of three classes takes 0.1 s: results are cached.
_BY_CLASS: WeakKeyDictionary[type, tuple[str, ...]] = WeakKeyDictionary()
_CONVERTERS = {"postprocess": VaeImageProcessor, "postprocess_video": VideoProcessor}


def output_types(cls: type) -> tuple[str, ...]:
    """The values with which a pipeline class compares `output_type`, and the usual ones."""
    if cls not in _BY_CLASS:
        _BY_CLASS[cls] = _output_types(cls)
    return _BY_CLASS[cls]


def _output_types(cls: type) -> tuple[str, ...]:
    types = dict.fromkeys(USUAL)
    for function in _functions(cls):
        for node in ast.walk(function):
            if isinstance(node, ast.Compare) and _is_name(node.left):
                for comparator in node.comparators:
                    leaves = ast.walk(comparator)
                    texts = [leaf.value for leaf in leaves if isinstance(leaf, ast.Constant)]
                    types.update(dict.fromkeys(text for text in texts if isinstance(text, str)))
    return tuple(types)


def only_converts(pipe: Any) -> bool:
    """Whether a pipeline's images are the same in all of its output types.

    True if `__call__` only compares `output_type` with "latent", passes it to its checks, and
    passes it to diffusers' own image or video processor.
    """
    classes = {name: type(value) for name, value in vars(pipe).items()}
    processors = {n: cls for n, cls in classes.items() if issubclass(cls, VaeImageProcessor)}
    return _only_converts(type(pipe).__call__, tuple(processors.items()))


@lru_cache(256)
def _only_converts(call: Any, processors: tuple[tuple[str, type], ...]) -> bool:
    try:
        tree = _parsed(call)
    except (OSError, TypeError, SyntaxError):  # no Python source
        return False
    plain: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and _is_name(node.left):
            comparator = node.comparators[0]
            if isinstance(comparator, ast.Constant) and comparator.value == "latent":
                plain.add(id(node.left))
        elif isinstance(node, ast.Call) and _is_converter(dict(processors), node.func):
            arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
            plain.update(id(argument) for argument in arguments if _is_name(argument))
    uses = [node for node in ast.walk(tree) if _is_name(node)]
    return bool(uses) and all(id(node) in plain for node in uses)


def _is_converter(processors: Mapping[str, type], function: ast.expr) -> bool:
    """Whether it is `self.image_processor.postprocess` or similar, not overridden."""
    if ast.unparse(function) == "self.check_inputs":
        return True
    if not isinstance(function, ast.Attribute) or function.attr not in _CONVERTERS:
        return False
    holder = function.value
    if not isinstance(holder, ast.Attribute) or ast.unparse(holder.value) != "self":
        return False
    if (processor := processors.get(holder.attr)) is None:
        return False
    converters = (getattr(processor, name, None) for name in _CONVERTERS)
    defaults = (getattr(VideoProcessor, name) for name in _CONVERTERS)
    return all(method in (None, plain) for method, plain in zip(converters, defaults, strict=True))


def _is_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "output_type"


def _has_name(function: Any) -> bool:
    """Whether a function uses the name, so that its source is worth reading."""
    code = function.__code__
    return "output_type" in (*code.co_varnames, *code.co_cellvars, *code.co_freevars)


def _functions(cls: type) -> list[ast.Module]:
    sources = []
    for function in vars(cls).values():
        if inspect.isfunction(function) and _has_name(inspect.unwrap(function)):
            try:
                sources.append(_parsed(function))
            except (OSError, TypeError, SyntaxError):
                continue
    return sources


def _parsed(function: Any) -> ast.Module:
    source = inspect.getsource(inspect.unwrap(function))
    # Not dedented: a multi-line text may start at the margin.
    return ast.parse(f"if True:\n{source}" if source[0].isspace() else source)
