"""Outputs as HTML for notebooks: pictures, clips, errors."""

import base64
import importlib.util
from html import escape
from typing import TYPE_CHECKING, Any

from carpool.media import encode_image, encode_video

if TYPE_CHECKING:
    from carpool.python.handle import Output

FPS = 16.0


def as_html(output: "Output") -> str | None:
    """An output as HTML; None if its pictures are not PIL images."""
    if output.error is not None:
        return f"<b>{type(output.error).__name__}</b>: {escape(str(output.error))}"
    clips, pictures = output.frames, output.images
    parts: list[str] = []
    if _is_drawn(clips) and all(map(_is_drawn, clips)):
        parts = [_clip(clip) for clip in clips]
    elif _is_drawn(pictures):
        parts = [_picture(picture) for picture in pictures]
    if not parts:
        return None
    caption = f"seed {output.seed}, {output.timings.total_s:.1f} s"
    return "".join([*parts, f"<br><small>{escape(caption)}</small>"])


def _is_drawn(entries: Any) -> bool:
    """Return whether entries are PIL images or clips of PIL images."""
    return isinstance(entries, list) and all(
        isinstance(entry, list) or hasattr(entry, "getbands") for entry in entries
    )


def _picture(picture: Any) -> str:
    return f'<img src="{_data_url("image/png", encode_image(picture, "png", 95, {}))}">'


def _clip(frames: list[Any]) -> str:
    if importlib.util.find_spec("av") is None:
        return _picture(frames[0])
    url = _data_url("video/mp4", encode_video(frames, FPS, {}))
    return f'<video controls loop src="{url}"></video>'


def _data_url(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
