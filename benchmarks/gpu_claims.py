"""Claims proven on a simulated device; parts *check* and *waits* verify them on a real device.

`docs/devices.md` lists them (`make devices`). A wrong claim is a failed row.
"""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import DiffusionPipeline

import carpool
from benchmarks.gpu_build import Rig, pixels
from carpool.models.embedded import MODEL_DIR

CLOSE = 0.02  # difference of values: kernels of one and several rows differ in last bits
PROMPTS = ["a white star on a red background", "a green ring on a black background", "a star"]
STEPS = (3, 5, 4)
SIZE = {"width": 64, "height": 64}


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim, with its test on the simulated device and its check on a real one."""

    sentence: str
    test: str  # test on the simulated device
    check: Callable[[Rig], str] | None = None  # None: part *waits* checks it


def tried(check: Callable[[Rig], str], rig: Rig) -> dict[str, str]:
    return {"table": "Claims of the simulated device", "outcome": check(rig)}


def _requests() -> list[carpool.Request]:
    kwargs: dict[str, Any] = {"output_type": "pt", **SIZE}
    turns = enumerate(zip(PROMPTS, STEPS, strict=True))
    return [carpool.Request(s, seed=i, num_inference_steps=n, **kwargs) for i, (s, n) in turns]


def _drawn(rig: Rig, together: bool = True, **settings: Any) -> list[torch.Tensor]:
    settings = {"device": str(rig.device), "dtype": "float32", **settings}
    with carpool.load("shapes", **settings) as engine:
        sets = [_requests()] if together else [[request] for request in _requests()]
        return [pixels(o) for few in sets for o in engine.generate(few, progress=False)]


def _same(images: list[torch.Tensor], expected: list[torch.Tensor], limit: float = CLOSE) -> str:
    gap = max(float((a - b).abs().max()) for a, b in zip(images, expected, strict=True))
    assert gap <= limit, f"{gap:.1e} apart"
    return "equal" if gap == 0 else f"{gap:.1e} apart"


def together(rig: Rig) -> str:
    return _same(_drawn(rig), _drawn(rig, together=False))


def exact(rig: Rig) -> str:
    settings: dict[str, Any] = {"numerics": "exact"}
    return _same(_drawn(rig, **settings), _drawn(rig, together=False, **settings), 0.0)


def streamed(rig: Rig) -> str:
    return _same(_drawn(rig, stream="transformer"), _drawn(rig))


def compiled(rig: Rig) -> str:
    return _same(_drawn(rig, compile=True), _drawn(rig))


def placed(rig: Rig) -> str:
    return _same(_drawn(rig, place="text_encoder_2=cpu"), _drawn(rig))


def pictures(rig: Rig) -> str:
    """Compare the engine's PIL pictures, converted on the device, with diffusers' pictures."""
    pipe = DiffusionPipeline.from_pretrained(MODEL_DIR, dtype=torch.float32).to(rig.device)
    pipe.set_progress_bar_config(disable=True)
    request = _requests()[0]
    parameters = {**request.parameters, "output_type": "pil", "max_sequence_length": 16}
    parameters["guidance_scale"] = 3.5
    plain = pipe(request.prompt, generator=torch.Generator().manual_seed(0), **parameters).images[0]
    with carpool.load("shapes", device=str(rig.device), dtype="float32") as engine:
        [answer] = engine.generate(request.prompt, seed=0, progress=False, **parameters)
    bytes_here, bytes_plain = (
        torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).int()
        for picture in (answer.images[0], plain)
    )
    gap = int((bytes_here - bytes_plain).abs().max())
    assert gap <= 2, f"a byte is {gap} off"
    return f"at most {gap} of 255 off"


def memory(rig: Rig) -> str:
    """Too little memory for all requests at once: forwards are split, and all are answered."""
    if rig.device.type != "cuda":
        return "not on this device"
    with carpool.load("shapes", device=str(rig.device), max_batch_size=64) as engine:
        requests = [_requests()[0] for _ in range(64)]
        engine.generate(requests[:2], progress=False)
        _, total = torch.cuda.mem_get_info()
        limit = torch.cuda.memory_reserved() + 24 * 2**20
        torch.cuda.set_per_process_memory_fraction(limit / total)
        try:
            answers = engine.generate(requests, progress=False)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
    assert len(answers) == len(requests)
    return f"64 requests within {limit / 2**20:.0f} MiB"


LOSS = """
import sys, torch, carpool, carpool.errors
with carpool.load("shapes", device=sys.argv[1]) as engine:
    engine.generate("a star", num_inference_steps=2, progress=False)
    torch.zeros(2, device=sys.argv[1])[torch.tensor([9], device=sys.argv[1])]  # an assertion there
    try:
        engine.generate("a star", num_inference_steps=2, progress=False)
    except carpool.errors.CarpoolError as error:
        print(type(error).__name__, flush=True)
"""


def lost(rig: Rig) -> str:
    """A failed device ends its requests as lost at once; runs in a separate process."""
    if rig.device.type != "cuda":
        return "not on this device"
    command = [sys.executable, "-X", "faulthandler", "-c", LOSS, str(rig.device)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    print(result.stderr, file=sys.stderr)
    assert result.stdout.strip(), f"status {result.returncode}, no answer: see the log"
    return result.stdout.strip().splitlines()[-1]


_TESTS = "tests/engine/device/test_"
CLAIMS = {
    "together": Claim(
        "Requests of mixed steps get together what each gets alone.",
        f"{_TESTS}whole_requests.py", together,
    ),
    "exact": Claim(
        "With `numerics=exact` they get the same bits.", "tests/engine/test_numerics.py", exact,
    ),
    "streamed": Claim(
        "Streamed weights are never read before they are there: pictures are the same.",
        f"{_TESTS}streaming_on_device.py", streamed,
    ),
    "placed": Claim(
        "A component that is placed elsewhere computes there.", f"{_TESTS}places.py", placed,
    ),
    "bytes": Claim(
        "Pictures become bytes on the device, the same as diffusers makes on the host.",
        f"{_TESTS}pictures_as_bytes.py", pictures,
    ),
    "memory": Claim(
        "Requests that do not fit together run in narrower forwards, and all are answered.",
        f"{_TESTS}memory.py", memory,
    ),
    "lost": Claim(
        "When the device fails for good, all its requests are answered as lost at once.",
        f"{_TESTS}device_lost.py", lost,
    ),
    "no waits": Claim(
        "The engine's own code makes the host wait for the device at no step.",
        f"{_TESTS}whole_requests.py",
    ),
    "copies": Claim(
        "Copies that pipelines and schedulers make from the host wait for nothing.",
        f"{_TESTS}pinned_copies.py",
    ),
    "ahead": Claim(
        "The loop prepares a forward while the one before runs, except where Python launches a"
        " forward's kernels more slowly than the device runs them.",
        f"{_TESTS}heartbeat_on_device.py",
    ),
}  # fmt: skip


def listed() -> list[str]:
    """The claims as rows of a table of `docs/devices.md`."""
    lines = [
        "| claim | | held on the simulated device by | on a real one by |",
        "| --- | --- | --- | --- |",
    ]
    for name, claim in CLAIMS.items():
        part = "waits" if claim.check is None else "check"
        lines.append(f"| {name} | {claim.sentence} | `{claim.test}` | `gpu_page {part}` |")
    return lines
