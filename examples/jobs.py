"""Jobs without a server: stop this process at any time and start it again; it continues.

usage: python examples/jobs.py [FOLDER]        (default: example-jobs)

The first run submits the jobs; each run waits for the unfinished ones and prints the files of all.
Run twice, it draws each picture once.
"""

import sys
from pathlib import Path

import carpool

PROMPTS = [
    "a red circle on a blue background",
    "a yellow star left of a green square on a black background",
    "a white ring on an orange background",
]


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "example-jobs")
    with carpool.load("shapes", state_dir=folder, metadata_prompt=True) as engine:
        if not engine.jobs.list():
            for prompt in PROMPTS:
                engine.jobs.submit(prompt, n=2, seed=3, num_inference_steps=16)
        for job in reversed(engine.jobs.list()):
            ended = engine.jobs.wait(job.id)
            print(ended.state, *ended.files, sep="\n  ")


if __name__ == "__main__":
    main()
