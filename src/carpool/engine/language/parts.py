"""Which modules of a component that generates are called by its `generate`, token by token.

`generate` stays that of its library and runs in the request's fiber. What it calls is heavy: the
component's own `forward`, once for the prompt and once for each token, and, where a class has a
`generate` of its own, its parts: an encoder of pictures or of the text to be continued, a language
model inside. These park while the component generates.
"""

from collections.abc import Iterator

from torch import nn

_UNCALLED = nn.Module.forward  # of lists and other containers, which are never called themselves


def called_parts(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost parts of a module that can be called."""
    for child in module.children():
        if type(child).forward is _UNCALLED or isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from called_parts(child)
        else:
            yield child
