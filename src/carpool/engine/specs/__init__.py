"""How the arguments of each model class fuse: data, one small table per class.

`infer.py` guesses the rules of a class without a table, and they are proven at run time; a table
states facts that shapes do not show, such as padding. To add one, give the meaning of the first
axis of every tensor argument of the method; other packages add tables by entry points
(`plugins.py`). Arguments without a rule must be plain Python values, equal in all calls of a
forward (flags); a call that passes a tensor or an object without a rule runs alone.

| rule | meaning | fused |
| --- | --- | --- |
| STACK | axis 0 is one entry a row | concatenated |
| STACKS | a list or dict of tensors like STACK, one a layer or condition | each concatenated |
| LAYERS | axis 0 is one entry a layer, axis 1 one a row | each layer concatenated, in a list |
| CONCAT | axis 0 counts other things, such as the patches of all rows | concatenated |
| SHARE | no row axis: one value for the whole forward | must be equal in content; one is passed |
| LIST | a Python list, one entry a row | joined |
| SCALAR | one number for all rows of a call | expanded to one a row |
| FACTOR | a number that multiplies the whole answer | each answer multiplied by its own |
| UNUSED | accepted for compatibility, not read | the first call's is passed |
| Pad | like STACK, but one axis may differ in length; exact when the mask is honoured | padded |
| State | an object; the table defines its key | the first call's, or as the table says |
| Keyed | like its inner rule, plus a key that must be equal | by that rule |
| Own | private to each call: keys and values, of any length | read and written call by call |
| Prefix | like its rule until keys and values are cached, then unread | by its rule, or the first |
| a dict | a dict argument, with a rule for each of its entries | entry by entry |

Sources: the `forward` methods of diffusers 0.42 and transformers 5, and their pipelines' arguments.
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
    "CONCAT", "FACTOR", "LAYERS", "LIST", "SCALAR", "SHARE", "SPECS", "STACK", "STACKS", "UNUSED",
    "Rule", "Keyed", "Own", "Pad", "Prefix", "ArgumentRule", "Spec", "State",
]  # fmt: skip
