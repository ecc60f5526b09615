"""Names that the walk knows: code that it need not read, and what changes something by its name."""

import sys
from typing import Any

from carpool.engine.foreign_code import LIBRARIES

_TOOLS = {  # used everywhere, and keep nothing of a request that another one could see
    *(
        "PIL",
        "attr",
        "cv2",
        "einops",
        "flash_attn",
        "ftfy",
        "huggingface_hub",
        "imageio",
        "jaxtyping",
    ),
    *("kornia", "matplotlib", "pydantic", "regex", "rich", "safetensors", "sageattention", "scipy"),
    *("sentencepiece", "skimage", "tokenizers", "tqdm", "triton", "typing_extensions", "xformers"),
}
READ_ALREADY = LIBRARIES | set(sys.stdlib_module_names) | _TOOLS
BLOCKING = {
    *("_asyncio", "_multiprocessing", "_queue", "_thread", "anyio", "asyncio", "concurrent"),
    *("gevent", "greenlet", "multiprocessing", "queue", "sched", "signal", "socket", "subprocess"),
    *("threading", "trio"),
}
PIPELINES = frozenset(("DiffusionPipeline", "ModularPipeline"))
KEEPERS = PIPELINES | {"SchedulerMixin"}  # a call changes them

MUTATORS = {  # methods of containers, files and numpy's arrays
    *("add", "append", "appendleft", "clear", "discard", "extend", "extendleft", "fill", "insert"),
    *("itemset", "move_to_end", "partition", "pop", "popitem", "popleft", "put", "put_nowait"),
    *(
        "remove",
        "resize",
        "reverse",
        "rotate",
        "send",
        "setdefault",
        "setfield",
        "sort",
        "subtract",
    ),
    *("throw", "truncate", "update", "write", "writelines", "__setitem__", "__delitem__"),
    *("__setattr__", "__delattr__", "__iadd__", "difference_update", "intersection_update"),
    *("symmetric_difference_update", "set_"),
}
ALIASES = {  # methods and attributes of tensors and arrays that show the same numbers
    *("T", "H", "mT", "mH", "as_strided", "bfloat16", "chunk", "contiguous", "cpu", "cuda", "data"),
    *("detach", "detach_", "diagonal", "double", "expand", "expand_as", "flatten", "float", "half"),
    *(
        "imag",
        "movedim",
        "narrow",
        "numpy",
        "permute",
        "ravel",
        "real",
        "requires_grad_",
        "reshape",
    ),
    *("select", "split", "squeeze", "swapaxes", "t", "tensor_split", "to", "transpose", "type"),
    *("type_as", "unbind", "unflatten", "unsqueeze", "view", "view_as", "__getitem__"),
}
ALIASING_FUNCTIONS = {"as_tensor", "asarray", "from_numpy", "asanyarray", "ascontiguousarray"}
IN_PLACE = {
    *("iadd", "iand", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow", "irshift"),
    *("isub", "itruediv", "ixor"),
}
PARTS = {  # methods that give parts of what they belong to
    *("buffers", "children", "copy", "get", "get_parameter", "get_submodule", "items", "keys"),
    *("modules", "named_buffers", "named_children", "named_modules", "named_parameters"),
    *("parameters", "pop", "popitem", "popleft", "setdefault", "state_dict", "values"),
    *("__getitem__", "__iter__", "__next__"),
}
OF_MODULES = {  # methods that change a module; those that may change nothing are seen when they run
    *("add_adapter", "add_module", "apply", "compile", "delete_adapters", "load_attn_procs"),
    *("load_lora_adapter", "load_state_dict", "set_adapter", "set_adapters", "set_processor"),
    *("remove_hook", "set_submodule", "unload_lora", "__setattr__", "__delattr__"),
}
OF_MODULES_START = ("disable_", "enable_", "fuse_", "register_", "set_", "unfuse_", "unload_")
OF_PIPELINES_START = ("fuse_", "unfuse_", "unload_")
ANYWHERE = {  # whatever they are called on
    *("functional_call", "fuse_lora", "fuse_qkv_projections", "load_ip_adapter"),
    *("load_lora_weights", "load_textual_inversion", "register_forward_hook"),
    *(
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ),
    *("register_module_forward_hook", "register_module_forward_pre_hook", "sdpa_kernel"),
    *("set_attn_processor", "set_default_device", "set_default_dtype", "set_default_tensor_type"),
    *("set_float32_matmul_precision", "set_num_threads", "set_rng_state_all", "swap_tensors"),
    *("unfuse_lora", "unfuse_qkv_projections", "unload_ip_adapter", "unload_lora_weights"),
    *(
        "use_deterministic_algorithms",
        "write_bytes",
        "write_text",
        "putenv",
        "unsetenv",
        "chdir",
        "check_if_exists_or_initialize",
    ),
}
MODES = frozenset(("TorchDispatchMode", "TorchFunctionMode"))
DYNAMIC = {"eval", "exec", "globals", "compile", "__import__"}
ON_THE_FIRST = {  # functions that change the first of their arguments
    *("delattr", "delitem", "heapify", "heappop", "heappush", "heappushpop", "heapreplace"),
    *("insort", "insort_left", "insort_right", "iadd", "setattr", "setitem", "shuffle"),
    *("copyto", "put", "referent", "putmask", "fill_diagonal"),
}
SHALLOW = {  # functions and classes that give what is in their arguments
    *("OrderedDict", "chain", "copy", "deque", "dict", "enumerate", "filter", "frozenset", "iter"),
    *("list", "map", "max", "min", "next", "partial", "product", "reversed", "set", "sorted"),
    *("tuple", "zip", "SimpleNamespace", "cast", "asdict", "replace", "islice", "cycle"),
}


def package(code: Any) -> str:
    """The package that a class or function was written in, whatever it is wrapped as."""
    names = getattr(code, "__globals__", None)  # `functools.wraps` copies `__module__`
    if type(names) is dict:
        return str(names.get("__name__") or "?").partition(".")[0]
    return str(getattr(code, "__module__", None) or "builtins").partition(".")[0]


def is_read_already(code: Any) -> bool:
    """Whether a class or function is of Python itself, a known library or a common tool."""
    return package(code) in READ_ALREADY


def is_named(cls: type, names: frozenset[str]) -> bool:
    """Whether a class or one of its bases is a library's class of one of these names."""
    return any(base.__name__ in names and is_read_already(base) for base in cls.__mro__)
