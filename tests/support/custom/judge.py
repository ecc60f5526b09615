"""The judge of a kind: a fresh pipeline without Carpool for each request, and the comparison."""

import os
import pickle
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from carpool.errors import CarpoolError
from support.custom.base import REQUESTS, Kind
from support.custom.switches import switches
from support.isolation import differences


def alone(kind: Kind) -> tuple[list[Any], set[str]]:
    """What plain diffusers gives in a fork, with a fresh pipeline for each request: the pictures,
    or their exceptions' names; and the switches of the process that are left changed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with open(writer, "wb") as file:
            before = switches()
            answers = [plain(*kind.build(), request) for request in REQUESTS]
            pickle.dump((answers, {*differences(before, switches())}), file)
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        answers, changed = pickle.load(file)
    os.waitpid(child, 0)
    return answers, changed


def plain(pipe: Any, arguments: Callable[[], dict[str, Any]], request: Mapping[str, Any]) -> Any:
    """Call a pipeline as diffusers' users do, every random generator seeded."""
    rest = {name: value for name, value in request.items() if name != "seed"}
    seed = request["seed"]
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    generator = torch.Generator().manual_seed(seed)
    try:
        given = {"output_type": "pt", "generator": generator, **rest, **arguments()}
        return pipe(**given).images.detach().numpy()
    except BaseException as error:  # of any kind: it is what is compared
        return type(error).__name__


def compared(answer: Any, expected: Any, limit: float) -> str:
    """What is wrong with an answer; nothing: empty."""
    if isinstance(expected, np.ndarray):
        expected = torch.from_numpy(expected)
    if isinstance(expected, str):
        return "" if isinstance(answer, CarpoolError) else f"{expected} in plain diffusers"
    if not isinstance(answer, torch.Tensor) or answer.shape != expected.shape:
        return f"gave {described(answer)}"
    gap = float((answer - expected).abs().nan_to_num(nan=torch.inf).max())
    gap /= max(1.0, float(expected.abs().max()))
    return f"{gap:.2g} off" if gap > limit else ""


def described(answer: Any) -> str:
    if isinstance(answer, Exception):
        return f"{type(answer).__name__}: {answer}"[:160]
    return f"{type(answer).__name__} {tuple(getattr(answer, 'shape', ()))}"
