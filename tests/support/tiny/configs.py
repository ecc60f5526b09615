"""Print the configurations of tiny checkpoints' denoisers and VAEs, for dry runs of `benchmarks/`.

usage: PYTHONPATH=tests python -m support.tiny.configs FAMILY...

One line of JSON: by family and component, the class and its configuration.
"""

import json
import sys

from support.tiny.checkpoints import build


def main(families: list[str]) -> None:
    found: dict[str, dict[str, tuple[str, dict[str, object]]]] = {}
    for family in families:
        found[family] = {}
        for name, part in build(family).components.items():
            if name in ("transformer", "unet", "vae"):
                config = {key: v for key, v in part.config.items() if not key.startswith("_")}
                found[family][name] = type(part).__name__, config
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
