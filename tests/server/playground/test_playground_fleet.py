"""The playground before several workers and models, a restarting server, clips with sound."""

import base64
import io
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from support.browser import tab
from support.server_process import DRAW, MODEL, eventually, serving
from support.tiny import ARGUMENTS, checkpoint

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]  # `make test-browser` runs them
RELOADED_MS = 150_000


def test_models_are_chosen_and_each_worker_has_its_strip(browser: Any) -> None:
    with (
        serving("--workers", "2", f"tiny={MODEL}", model="shapes") as server,
        tab(browser, server.url) as opened,
    ):
        page = opened.page
        page.wait_for_selector("#f-model")
        opened.draw("a red circle", n="8", num_inference_steps="120")
        page.select_option("#f-model", "tiny")
        opened.until("document.querySelector('#f-num_inference_steps').value === ''")
        assert page.input_value("#f-prompt") == "a red circle"  # it is kept
        length = str(DRAW["max_sequence_length"])
        page.click("text=More settings")
        opened.draw("a blue dog", n="2", width="64", height="64", num_inference_steps="60",
                    max_sequence_length=length)  # fmt: skip

        opened.until("document.querySelectorAll('#strips [data-worker]').length === 4")
        page.click("#tab-engine")
        busy = "[...document.querySelectorAll('#workers .worker')].map((one) => one.textContent)"
        for worker in ("shapes worker 0", "shapes worker 1"):
            opened.until(f"{busy}.some((text) => /^{worker} · cpu · [1-9]/.test(text))")
        opened.picture("fleet")
        names = page.locator("#workers [data-worker]")
        assert [names.nth(i).get_attribute("data-worker") for i in range(4)] == [
            "shapes worker 0", "shapes worker 1", "tiny worker 0", "tiny worker 1",
        ]  # fmt: skip
        page.click("#tab-draw")
        opened.card("a blue dog", within_ms=RELOADED_MS)
        opened.card("a red circle", within_ms=RELOADED_MS)


def test_a_page_that_stays_open_goes_on_when_the_whole_server_is_started_again(
    browser: Any, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    flags = ("--port", port, "--state-dir", str(tmp_path / "state"))
    with serving(*flags, model="shapes") as first, tab(browser, first.url) as opened:
        page = opened.page
        page.wait_for_selector("#f-prompt")
        opened.draw("a green ring", num_inference_steps="400", seed="9")
        opened.until("document.querySelectorAll('#current img.preview').length === 1")

        for pid in first.processes():
            os.kill(pid, signal.SIGKILL)
        first.process.wait(20)
        page.get_by_text("not reachable").first.wait_for()
        page.fill("#f-prompt", "typed meanwhile")
        page.click("#form button[type=submit]")
        page.get_by_text("The server cannot be reached").first.wait_for()

        with serving(*flags, model="shapes"):
            page.get_by_text("shapes: ready").wait_for(timeout=RELOADED_MS)
            opened.card("a green ring", within_ms=RELOADED_MS)
            assert page.input_value("#f-prompt") == "typed meanwhile"
            page.fill("#f-num_inference_steps", "4")
            page.click("#form button[type=submit]:not([disabled])")
            opened.card("typed meanwhile", within_ms=RELOADED_MS)
            assert page.locator("#notice").is_hidden()
            assert not "".join(page.locator("#form .error").all_inner_texts())


def test_a_clip_with_sound_is_heard_once_it_is_opened(browser: Any) -> None:
    with serving(model=str(checkpoint("ltx2"))) as films, tab(browser, films.url) as opened:
        page = opened.page
        page.wait_for_selector("#f-num_frames")
        opened.draw("waves", num_inference_steps="2", num_frames="9", width="32", height="32")
        card = opened.card("waves", within_ms=RELOADED_MS)
        assert card.locator("video").evaluate("(video) => video.muted")  # many play at once

        card.locator(".card-open").click()

        video = page.locator("#detail video")
        video.wait_for()
        opened.until("document.querySelector('#detail video').currentTime > 0.05")
        assert not video.evaluate("(video) => video.muted")
        opened.until("document.querySelector('#detail video').webkitAudioDecodedByteCount > 0")


# The playground turns meshes, and plays sound below its wave


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
