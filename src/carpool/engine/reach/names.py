"""Names of library code by effect: blocking, writing, returning parts."""

import re
import sys

from carpool.engine.foreign_code import LIBRARIES

SHIPPED = LIBRARIES | set(sys.stdlib_module_names)  # packages whose code is not analysed

BLOCKING = {
    *("_asyncio", "_multiprocessing", "_queue", "_thread", "anyio", "asyncio", "concurrent"),
    *("ctypes", "fcntl", "gevent", "greenlet", "multiprocessing", "queue", "sched", "signal"),
    *("socket", "sqlite3", "subprocess", "threading", "trio", "unittest"),
}
FORBIDDEN = re.compile(
    r"builtins\.((del|set)attr|eval|exec|globals|compile|__import__)$|_io\.open$|"
    r"importlib\.import_module$"
)
ANYWHERE = re.compile(  # names that change modules, pipelines or files, wherever they are used
    r"(functional_call|swap_tensors|set_adapters|set_attn_processor|(en|dis)able_freeu|chdir|"
    r"(un)?fuse_(lora|qkv_projections)|(un)?load_(lora_weights|ip_adapter|textual_inversion)|"
    r"register_(module_)?(forward|full_backward)_(pre_)?hook|check_if_exists_or_initialize|putenv|"
    r"write_(bytes|text)|unsetenv|currentframe|_getframe|set(_printoptions|locale|Level)|"
    r"(Named)?TemporaryFile|(add|remove)(Handler|Filter)|redirect_std(out|err))$"
)
WRITERS = re.compile(  # methods that change their object
    r"(add|append(left)?|clear|discard|extend(left)?|fill|insert|move_to_end|partition|put(_nowait)?|"
    r"pop(item|left)?|re(move|size|verse)|rotate|send|setdefault|sort|subtract|throw|truncate|train|"
    r"(\w+_)?update|write(lines)?|__(set|del)(item|attr)__|load_state_dict|apply|compile|"
    r"__i(add|and|concat|floordiv|[lr]shift|(mat)?mul|mod|or|pow|sub|truediv|xor)__|"
    r"add_(module|adapter)|delete_adapters|load_attn_procs|(un)?load_lora\w*|remove_hook|[a-z].*_)$"
)
OF_MODULES = ("disable_", "enable_", "fuse_", "register_", "set_", "unfuse_", "unload_")
ON_THE_FIRST = re.compile(  # functions that change their first argument
    r"(copyto|(del|set)item|fill_diagonal|heap(ify|pop|push|pushpop|replace)|insort(_left|_right)?|"
    r"i(add|and|mul|or|sub|truediv)|put(mask)?|shuffle)$"
)
ENTRIES = re.compile(  # methods and functions that return entries of their object or argument
    r"(get(_parameter|_submodule)?|pop(item|left)?|setdefault|next|max|min|choice|list|tuple|dict|"
    r"set|sorted|reversed|map|filter|zip|enumerate|iter|chain|deque|children|state_dict|__getitem__|"
    r"(named_)?(buffers|children|modules|parameters))$"
)
VIEWING = re.compile(  # methods and functions that return another view of the same data
    r"(as_strided|chunk|contiguous|cpu|detach|diagonal|expand(_as)?|(un)?flatten|float|half|narrow|"
    r"numpy|permute|ravel|reshape|select|split|(un)?squeeze|t|to|transpose|unbind|view(_as)?|"
    r"as_tensor|asarray|from_numpy|vars|items|values)$"
)
IN_PLACE = re.compile(r"[a-z_]\w*[a-z0-9]_$")  # torch functions that change their arguments
VIEWS = {"T", "H", "mT", "data", "grad", "real", "imag"}
AT_CREATION = re.compile(
    r"__(init|new|repr|str|del|eq|hash|\w*copy|reduce\w*|[gs]etstate|\w+_subclass|set_name)__$"
)
SETTING_UP = re.compile(  # library methods that no pipeline call uses
    r"((from|save|load)_\w+|_?init_\w*weights|reset_parameters|register_\w+|post_init|tie_weights|"
    r"extra_repr|state_dict|_apply|apply|train|eval|to|half|float|cuda|cpu|download)$"
)
CONTEXT = {"__enter__", "__exit__", "__aenter__", "__aexit__"}
