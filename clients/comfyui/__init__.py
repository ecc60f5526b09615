"""ComfyUI nodes that draw with a Carpool server.

Copy this folder into `ComfyUI/custom_nodes/carpool`. It needs nothing that ComfyUI has not: the
standard library speaks to the server; torch, numpy and Pillow are ComfyUI's own.
"""

import base64
import io
import json
import urllib.error
import urllib.request
from typing import Any

TIMEOUT_S = 3600.0
SERVER = "http://127.0.0.1:8000"


def ask(server: str, path: str, body: dict[str, Any], key: str = "") -> dict[str, Any]:
    """Post JSON to a server, and return its answer.

    Raises:
        RuntimeError: the server's own message, or why there was no answer.
    """
    headers = {"content-type": "application/json"}
    headers |= {"authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(
        server.rstrip("/") + path, json.dumps(body).encode(), headers, method="POST"
    )
    if request.type not in ("http", "https"):
        raise RuntimeError(f"{server} is no server: write {SERVER}")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            told: dict[str, Any] = json.load(answer)
            return told
    except urllib.error.HTTPError as error:
        raise RuntimeError(_message(error)) from error
    except urllib.error.URLError as error:
        raise RuntimeError(f"no server answers at {server}: {error.reason}") from error


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {error.code}"


def to_url(image: Any) -> str:
    """A picture, (height, width, 3) in 0-1, or (height, width, 4), as a PNG in a `data:` URL."""
    import numpy as np
    from PIL import Image

    pixels = (np.asarray(image, dtype=np.float32).clip(0, 1) * 255).round().astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def to_mask(mask: Any) -> str:
    """A mask, (height, width), 1 where to draw anew, as a PNG that is transparent there."""
    import numpy as np

    alpha = 1 - np.asarray(mask, dtype=np.float32)
    return to_url(np.stack([np.zeros_like(alpha)] * 3 + [alpha], axis=-1))


def to_tensor(answer: dict[str, Any]) -> Any:
    """The pictures of an answer, (pictures, height, width, 3) in 0-1."""
    import numpy as np
    import torch
    from PIL import Image

    pictures = []
    for one in answer["data"]:
        with Image.open(io.BytesIO(base64.b64decode(one["b64_json"]))) as image:
            pictures.append(np.asarray(image.convert("RGB"), dtype=np.float32) / 255)
    return torch.from_numpy(np.stack(pictures))


class CarpoolDraw:
    """Draw from a text, or a picture anew: as the text says, where a mask says."""

    CATEGORY = "Carpool"
    FUNCTION = "draw"
    RETURN_TYPES = ("IMAGE",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        number: dict[str, Any] = {"default": 0, "min": 0}
        return {
            "required": {
                "server": ("STRING", {"default": SERVER}),
                "prompt": ("STRING", {"multiline": True}),
                "seed": ("INT", {**number, "max": 2**63 - 1}),
                "pictures": ("INT", {"default": 1, "min": 1, "max": 10}),
            },
            "optional": {  # 0, or nothing: as the model has it
                "api_key": ("STRING", {"default": ""}),
                "negative_prompt": ("STRING", {"multiline": True, "default": ""}),
                "width": ("INT", {**number, "max": 8192}),
                "height": ("INT", {**number, "max": 8192}),
                "steps": ("INT", {**number, "max": 1000}),
                "guidance_scale": ("FLOAT", {"default": 0.0, "min": 0.0, "max": 100.0}),
                "strength": ("FLOAT", {"default": 0.0, "min": 0.0, "max": 1.0}),
                "more": ("STRING", {"multiline": True, "default": "{}"}),
                "image": ("IMAGE",),
                "mask": ("MASK",),
            },
        }

    def draw(
        self,
        server: str,
        prompt: str,
        seed: int,
        pictures: int,
        api_key: str = "",
        negative_prompt: str = "",
        width: int = 0,
        height: int = 0,
        steps: int = 0,
        guidance_scale: float = 0.0,
        strength: float = 0.0,
        more: str = "{}",
        image: Any = None,
        mask: Any = None,
    ) -> tuple[Any]:
        """Ask the server.

        Args:
            more: further parameters of the model's pipeline, as JSON.
            image: (pictures, height, width, 3) in 0-1.
            mask: (masks, height, width), 1 where to draw anew.

        Raises:
            RuntimeError: the server's own message.
        """
        body: dict[str, Any] = {"prompt": prompt, "seed": seed, "n": pictures}
        said = {
            "negative_prompt": negative_prompt,
            "width": width,
            "height": height,
            "num_inference_steps": steps,
            "guidance_scale": guidance_scale,
            "strength": strength,
        }
        body |= {name: value for name, value in said.items() if value}
        try:
            body |= json.loads(more or "{}")
        except (ValueError, TypeError) as error:
            raise RuntimeError(f"more must be a JSON object: {error}") from error
        path = "/v1/images/generations"
        if image is not None:
            path = "/v1/images/edits"
            body["images"] = [{"image_url": to_url(one)} for one in image]
            body |= {} if mask is None else {"mask": {"image_url": to_mask(mask[0])}}
        return (to_tensor(ask(server, path, body, api_key)),)


NODE_CLASS_MAPPINGS = {"CarpoolDraw": CarpoolDraw}
NODE_DISPLAY_NAME_MAPPINGS = {"CarpoolDraw": "Draw with Carpool"}
