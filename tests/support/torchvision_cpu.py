"""torchvision beside a CPU build of torch, for the processors of edit models.

No index has a CPU build of it, and the CUDA build cannot load its operators here. Processors only
need its Python part, which registers fakes of those operators when it is imported: so the
operators are declared, without bodies, before that. `make test-models` puts the package into
build/torchvision, out of sight of everything but these tests.
"""

import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "build" / "torchvision"
IS_THERE = FOLDER.is_dir() or find_spec("torchvision") is not None

_declared: list[object] = []  # forgotten ones are undone


def install() -> None:
    """Make `import torchvision` work, if the package is there. Before transformers is imported."""
    if not FOLDER.is_dir():
        return
    from torch.library import Library  # not every test needs it

    sys.path.append(str(FOLDER))
    source = (FOLDER / "torchvision" / "_meta_registrations.py").read_text()
    names = re.findall(r'(?:register_meta\(|register_fake\()"(?:torchvision::)?(\w+)"', source)
    library: Any = Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for name in sorted(set(names)):
        library.define(f"{name}(Tensor a) -> Tensor")
    _declared.append(library)
