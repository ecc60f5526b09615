"""The playground turns meshes, and plays sound below its wave."""

import base64
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from support.browser import tab
from support.server_process import eventually, serving
from support.tiny import ARGUMENTS, checkpoint

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]  # `make test-browser` runs them
TESTS = Path(__file__).parents[2]
FACTORY = f"""import sys
sys.path.insert(0, {str(TESTS)!r})
from support.mesh_pipeline import mesh_pipeline as build
"""


def drawn(page: Any, canvas: str) -> str:
    """The picture on a canvas, once it is not empty."""
    blank = f"""(() => {{ const shown = document.querySelector({canvas!r}); if (!shown) return "";
        const empty = document.createElement("canvas");
        [empty.width, empty.height] = [shown.width, shown.height];
        const [now, before] = [shown.toDataURL(), empty.toDataURL()];
        return now === before ? "" : now; }})()"""
    eventually(lambda: page.evaluate(blank) != "", 60, canvas)
    return str(page.evaluate(blank))


def test_a_mesh_is_turned_by_keys_and_by_the_pointer(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FACTORY)
    out = io.BytesIO()
    Image.new("RGB", (16, 16), "red").save(out, "PNG")
    picture = "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
    with serving("--pipeline", f"{tmp_path / 'mine.py'}:build", model="") as server:
        with server.client() as http:
            answer = http.post("/v1/meshes", json={"input_reference": {"image_url": picture}})
            assert answer.status_code == 200, answer.text
            mesh = answer.json()["id"]
            eventually(
                lambda: http.get(f"/v1/meshes/{mesh}").json()["status"] == "completed", 60, mesh
            )
        with tab(browser, server.url) as opened:
            first = drawn(opened.page, "canvas.mesh")
            opened.page.focus("canvas.mesh")
            opened.page.keyboard.press("ArrowRight")
            second = drawn(opened.page, "canvas.mesh")
            opened.page.keyboard.press("+")
            assert len({first, second, drawn(opened.page, "canvas.mesh")}) == 3
            opened.picture("mesh")


def test_sound_is_asked_for_and_played_below_its_wave(browser: Any) -> None:
    own = {n: v for n, v in ARGUMENTS["stable_audio"].items() if n != "output_type"}
    with (
        serving(model=str(checkpoint("stable_audio"))) as server,
        tab(browser, server.url) as opened,
    ):
        opened.page.wait_for_selector("#f-prompt")
        opened.page.click("text=More settings")
        opened.draw("a bell", **{name: str(value) for name, value in own.items()})
        card = opened.card("a bell")
        drawn(opened.page, "canvas.wave")
        assert card.locator("audio").get_attribute("src").startswith("blob:")
        opened.picture("sound")
