"""How the arguments of each model class fuse: data, a small table a class.

A class without a table is guessed by `infer.py` and proven at run time; a table says what shapes
cannot tell, such as padding. To add one, say for every tensor argument of the method what its first
axis means; other packages add theirs by entry points (`plugins.py`). Arguments that the table does
not name must be plain Python values, equal in all calls of a forward (flags); a call that passes a
tensor or an object under a name the table does not know runs alone.

| rule | meaning | fused |
| --- | --- | --- |
| STACK | axis 0 is one entry a row | concatenated |
| STACKS | a list or dict of tensors, a layer or a condition each, like STACK | each concatenated |
| LAYERS | axis 0 is one entry a layer, axis 1 one a row | each layer concatenated, in a list |
| CONCAT | axis 0 counts something else, such as the patches of all rows | concatenated |
| SHARE | no row axis: one value for the whole forward | must be equal in content; one is passed |
| LIST | a Python list, one entry a row | joined |
| SCALAR | one number for all rows of a call | expanded to one a row |
| FACTOR | a number that the whole answer is multiplied by | each answer multiplied by its own |
| UNUSED | taken for the sake of other classes, and not read | that of the first call is passed |
| Pad | like STACK, but one axis may differ in length; exact when the mask is honoured | padded |
| State | an object, of which the table says what must be equal | that of the first, or as it says |
| Keyed | like the rule that it holds, with something that must be equal | by that rule |
| Own | each call has its own: keys and values, of any length | read and written call by call |
| Prefix | like its rule until keys and values are cached, then unread | by its rule, or the first |
| a dict | a dict argument, with a rule for each of its entries | entry by entry |

Sources: the `forward` methods of diffusers 0.42 and transformers 5, and what their pipelines pass.
"""

from carpool.engine.specs import autoencoders, image, text, video
from carpool.engine.specs.own import Own, Prefix
from carpool.engine.specs.padding import Pad
from carpool.engine.specs.rule import Rule
from carpool.engine.specs.rules import (
    CONCAT,
    FACTOR,
    LAYERS,
    LIST,
    SCALAR,
    SHARE,
    STACK,
    STACKS,
    UNUSED,
    ArgumentRule,
    Keyed,
    Spec,
    State,
)

SPECS: dict[tuple[str, str], Spec] = {
    **image.SPECS,
    **video.SPECS,
    **text.SPECS,
    **autoencoders.SPECS,
}

__all__ = [
    "CONCAT",
    "FACTOR",
    "LAYERS",
    "LIST",
    "SCALAR",
    "SHARE",
    "SPECS",
    "STACK",
    "STACKS",
    "UNUSED",
    "Rule",
    "Keyed",
    "Own",
    "Pad",
    "Prefix",
    "ArgumentRule",
    "Spec",
    "State",
]
