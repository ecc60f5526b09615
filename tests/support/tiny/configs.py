"""Print the configurations of tiny checkpoints' denoisers and VAEs, for dry runs of `benchmarks/`.

usage: PYTHONPATH=tests python -m support.tiny.configs FAMILY...

One line of JSON: by family and component, the class and its configuration.
"""

import json
import sys

from support.tiny.recipes import recipes_of, resolved


def main(families: list[str]) -> None:
    configs = {
        family: {
            name: resolved(recipe)[:2]
            for name, recipe in recipes_of(family).items()
            if name in ("transformer", "unet", "vae")
        }
        for family in families
    }
    print(json.dumps(configs))


if __name__ == "__main__":
    main(sys.argv[1:])
