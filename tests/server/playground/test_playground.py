"""The playground in a real browser: what a person does with it, from the first drawing on."""

import io
import json
import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from support.browser import Tab, tab
from support.server_process import Server, serving

pytestmark = pytest.mark.timeout(250)
KEY = "a-secret-key"


@pytest.fixture(scope="module")
def server(browser: Any) -> Iterator[Server]:
    """Serves the embedded model to clients with a key. The last test kills its worker."""
    with serving("--api-key", KEY, "--metadata-prompt", model="shapes") as server:
        yield server


@pytest.fixture
def page(browser: Any, server: Server) -> Iterator[Tab]:
    with tab(browser, server.url, KEY) as opened:
        opened.page.wait_for_selector("#f-prompt")
        yield opened


def test_a_wrong_key_is_asked_for_again_and_the_right_one_stays_in_its_tab(
    browser: Any, server: Server
) -> None:
    with tab(browser, server.url) as opened:
        page = opened.page
        page.fill("#key", "a-wrong-key")
        page.click("#key-form .primary")
        page.get_by_text("not one of the server's").wait_for()

        page.fill("#key", KEY)
        page.click("#key-form .primary")

        page.wait_for_selector("#f-prompt")
        page.get_by_text("shapes: ready").wait_for()
        assert KEY not in page.evaluate("JSON.stringify(localStorage) + location.href")


def test_a_stranger_begins_with_an_example(browser: Any, server: Server) -> None:
    with tab(browser, server.url, KEY) as opened:
        opened.page.get_by_text("Nothing drawn yet").wait_for()
        opened.picture("first")

        opened.page.click("#examples >> text=a yellow star")

        opened.card("a yellow star on a black background").locator("img").wait_for()
        assert opened.page.locator("#empty").is_hidden()
        assert opened.page.input_value("#f-prompt") == "a yellow star on a black background"


def test_two_drawings_at_once_share_forwards_and_the_page_shows_it(page: Tab) -> None:
    page.draw("a red circle on a blue background", num_inference_steps="200")
    page.draw("a green square on a yellow background", num_inference_steps="200")
    page.page.get_by_text("2 requests running").first.wait_for()
    page.until("document.querySelectorAll('#results img').length === 2")
    page.picture("drawing")

    for prompt in ("red circle", "green square"):
        card = page.card(prompt)
        card.get_by_text("of 200 steps shared with others").wait_for()

    page.card("red circle").locator(".card-open").click()
    dialog = page.page.locator("#detail")
    dialog.get_by_text("“a green square on a yellow background”").wait_for()
    assert re.search(r"[1-9]\d* of its 200 steps shared", dialog.inner_text())
    page.picture("details")


def test_the_engine_view_tells_of_each_forward_who_shared_it_and_why_no_more(
    page: Tab, server: Server
) -> None:
    page.draw("a blue triangle", n="8", num_inference_steps="60", seed="1, 2, 3, 4, 5")
    page.page.click("#tab-engine")
    page.until("Number(document.querySelector('#numbers b').textContent) > 8")
    page.until(  # the numbers are plotted: that takes seconds of forwards
        """(plot => {
          const empty = document.createElement("canvas");
          [empty.width, empty.height] = [plot.width, plot.height];
          return plot.toDataURL() !== empty.toDataURL();
        })(document.querySelectorAll("#numbers canvas")[2])"""
    )
    page.picture("engine")

    lanes = page.page.locator("#lanes")
    lanes.focus()
    lanes.press("ArrowLeft")
    told = page.page.locator("#block").inner_text()
    page.page.click("text=The same as a table")

    assert "Not wider: " in told
    assert "transformer.forward" in told or "text_encoder" in told or "vae" in told
    page.page.get_by_role("cell", name="a blue triangle").first.wait_for()
    with server.client(headers={"authorization": f"Bearer {KEY}"}) as client:
        for job in client.get("/v1/jobs").json()["data"]:  # they are in nobody's way
            client.post(f"/v1/jobs/{job['id']}/cancel")


def test_a_drawing_can_be_cancelled(page: Tab) -> None:
    page.draw("a green ring", num_inference_steps="900", n="1", seed="")
    page.card("a green ring", "in_progress").get_by_text("Cancel", exact=True).click()

    page.card("a green ring", "cancelled")


def test_a_picture_is_edited_where_the_mask_was_painted(page: Tab) -> None:
    page.draw("a blue square on a white background", seed="3")
    page.card("blue square").locator(".card-open").click()
    page.page.click("#detail >> text=Draw with it")
    page.page.click("text=Paint where to draw anew")
    canvas = page.page.locator(".painter canvas")
    box = canvas.bounding_box()
    page.page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + box["height"] * 0.3)
    page.page.mouse.down()
    page.page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + box["height"] * 0.6, steps=5)
    page.page.mouse.up()
    page.picture("mask")

    page.draw("a red circle on a white background", seed="4", strength="0.9")

    page.card("a red circle on a white background").locator(".card-open").click()
    page.page.locator("#detail td", has_text="inpaint").wait_for()


def test_an_adapter_is_used_at_its_scale(page: Tab) -> None:
    page.page.check("input[value=outlined]")
    page.page.fill("[data-scale=outlined]", "0.8")

    page.draw("a red square")

    page.card("a red square").locator(".card-open").click()
    page.page.locator("#detail td", has_text='"scale":0.8').wait_for()


def test_an_adapter_that_is_not_listed_is_shown_where_a_file_names_it(page: Tab) -> None:
    """As of one of two experts, or of another server: nothing is dropped without a word."""
    told, content = PngInfo(), io.BytesIO()
    lora = [["outlined", 0.5], ["style@transformer_2", 0.7]]
    told.add_itxt("carpool", json.dumps({"prompt": "a red star", "seed": 5, "lora": lora}))
    Image.new("RGB", (8, 8)).save(content, "PNG", pnginfo=told)

    _drop(page, content.getvalue())
    page.until("document.querySelector('#f-seed').value === '5'")
    page.draw("a red star")

    assert page.page.is_checked("input[value=outlined]")
    assert page.page.input_value('[data-scale="style@transformer_2"]') == "0.7"
    page.page.locator("#e-lora").get_by_text("no adapter 'style'").wait_for()


def test_the_gallery_survives_a_reload_and_gives_settings_back(page: Tab, tmp_path: Any) -> None:
    page.draw("a yellow triangle on a blue background", seed="77", num_inference_steps="5")
    page.card("yellow triangle")
    page.page.reload()
    page.page.wait_for_selector("#f-prompt")

    page.page.click("#tab-gallery")
    card = page.page.locator("#gallery .card", has_text="yellow triangle").first
    card.locator("img").wait_for()
    page.picture("gallery")
    with page.page.expect_download() as download:
        card.locator(".card-open").click()
        page.page.click("#detail >> text=Download")
    file = tmp_path / "kept.png"
    download.value.save_as(file)
    page.page.click("#detail >> text=Use settings")

    assert _form(page) == {"seed": "77", "num_inference_steps": "5"}
    page.page.reload()
    page.page.wait_for_selector("#f-prompt")
    _drop(page, file.read_bytes())
    page.until("document.querySelector('#f-seed').value === '77'")
    assert _form(page) == {"seed": "77", "num_inference_steps": "5"}
    assert page.page.input_value("#f-prompt") == "a yellow triangle on a blue background"


def test_a_picture_of_another_tool_gives_its_settings_and_what_is_not_read_is_said(
    page: Tab,
) -> None:
    seed = 2**63 - 1
    said = "a red star on a black background <lora:outlined:0.5>\nNegative prompt: \n"
    said += f'Steps: 5, Sampler: Euler a, Seed: {seed}, ADetailer prompt: "x, Steps: 3, Seed: 9"'
    text = PngInfo()
    text.add_text("parameters", said, zip=True)
    content = io.BytesIO()
    Image.new("RGB", (8, 8)).save(content, "PNG", pnginfo=text)

    _drop(page, content.getvalue())

    page.until(f"document.querySelector('#f-seed').value === '{seed}'")
    assert _form(page) == {"seed": str(seed), "num_inference_steps": "5"}
    assert page.page.input_value("#f-prompt") == "a red star on a black background"
    assert page.page.is_checked('input[name="lora"][value="outlined"]')
    assert "Sampler, ADetailer prompt" in page.page.inner_text("#notice")

    page.page.click("#form button[type=submit]:not([disabled])")
    card = page.card("a red star on a black background")
    card.get_by_text(f"seed {seed}").wait_for()
    page.choose("Use settings")
    assert page.page.input_value("#f-seed") == str(seed)

    graph = PngInfo()
    graph.add_text("prompt", '{"3": {"class_type": "KSampler", "inputs": {}}}')
    content = io.BytesIO()
    Image.new("RGB", (8, 8)).save(content, "PNG", pnginfo=graph)
    _drop(page, content.getvalue())
    page.page.get_by_text("ComfyUI made this picture").wait_for()


def _form(page: Tab) -> dict[str, str]:
    return {name: page.page.input_value(f"#f-{name}") for name in ("seed", "num_inference_steps")}


def _drop(page: Tab, content: bytes) -> None:
    """Drop a file onto the middle of the page."""
    page.page.evaluate(
        """(bytes) => {
          const data = new DataTransfer();
          data.items.add(new File([new Uint8Array(bytes)], "dropped.png", {type: "image/png"}));
          const target = document.querySelector("main");
          const how = {dataTransfer: data, bubbles: true, cancelable: true};
          for (const kind of ["dragover", "drop"]) target.dispatchEvent(new DragEvent(kind, how));
        }""",
        list(content),
    )


def test_a_frame_of_two_hundred_requests_draws_each_visible_forward_once(page: Tab) -> None:
    calls = page.page.evaluate(
        """async () => {
          const { Activity } = await import("./playground/activity.js");
          const { Lanes } = await import("./playground/lanes.js");
          const numbers = Array.from({length: 200}, (_, i) => i), activity = new Activity();
          const forwards = Array.from({length: 2000}, (_, i) => ({module: "transformer.forward",
            phase: "denoise", began_s: 88 + i / 100, duration_s: 0.009, rows: 8, why: "cap",
            requests: numbers.slice((i * 8) % 200, (i * 8) % 200 + 8)}));
          activity.take({now_s: 108, forwards, waiting: [], waiting_count: 0,
            running: numbers.map((number) => ({number, phase: "denoise", step: 1, steps: 9}))});
          document.querySelector("#tab-engine").click();
          const lanes = new Lanes(document.querySelector("#lanes"), activity, String);
          lanes.frozenS = 108;
          const context = CanvasRenderingContext2D.prototype, calls = {};
          for (const name of ["fillRect", "fill", "fillText", "measureText", "stroke"]) {
            const own = context[name];
            context[name] = function (...rest) {
              if (this.canvas === lanes.canvas) calls[name] = (calls[name] || 0) + 1;
              return own.apply(this, rest);
            };
          }
          lanes.draw();
          return calls;
        }"""
    )

    blocks = 8 * 100  # the view is 8 s long
    assert (
        blocks <= calls.pop("fillRect") + calls.pop("fill", 0) <= blocks + 200 + 20
    )  # lanes, axis
    assert sum(calls.values()) < 40  # texts of the axis, none of the lanes: they are too narrow


def test_each_worker_has_lanes_and_a_clock_of_its_own_and_numbers_are_of_all(page: Tab) -> None:
    told = page.page.evaluate(
        """async () => {
          const { Workers } = await import("./playground/workers.js");
          for (const id of ["workers", "strips"]) document.getElementById(id).replaceChildren();
          const workers = new Workers(String, () => {});
          const activity = (model, worker, now_s, requests) => ({ model, worker, now_s, missed: 0,
            running: requests.map((number) => ({ number, phase: "denoise", step: 1, steps: 9 })),
            waiting: [], waiting_count: 1,
            forwards: [{ module: "transformer.forward", why: "cap", phase: "denoise", requests,
                         began_s: now_s - 1, duration_s: 0.5, rows: requests.length }] });
          const stats = (model, worker, held) => ({ model, worker, held, steps: 7,
            memory: { device: "cpu", weights_bytes: 1048576 } });
          workers.take(activity("b", 1, 5000, [1, 2, 3]));
          workers.take(activity("b", 0, 10, [1]));
          workers.take(activity("a", 0, 900, [1, 2]));
          workers.take(activity("b", 1, 5000.2, [1, 2, 3]));
          for (const [model, worker, held] of [["b", 0, 4], ["b", 1, 4], ["a", 0, 2]]) {
            workers.takeStats(stats(model, worker, held));
          }
          const all = (what) => [...document.querySelectorAll(`#workers ${what}`)];
          return {
            names: all("[data-worker]").map((one) => one.dataset.worker),
            captions: all(".worker").map((one) => one.textContent),
            forwards: workers.all.map((one) => one.activity.forwards.length).sort(),
            running: workers.running.length, waiting: workers.waitingCount,
            steps: workers.sum((one) => one.steps), rows: workers.means().rows,
          };
        }"""
    )

    assert told["names"] == ["a worker 0", "b worker 0", "b worker 1"]
    assert told["captions"][2] == "b worker 1 · cpu · 3 requests running · 1 waiting · 1.0 MiB"
    assert told["forwards"] == [1, 1, 2]  # one worker's clock resets no other's
    assert (told["running"], told["steps"]) == (6, 21)
    assert told["waiting"] == 3 + 4 + 2  # at the workers, and at the front for each model
    assert told["rows"] == pytest.approx((3 + 3 + 2 + 1) / 4)


def test_jobs_that_no_worker_has_yet_count_as_waiting(page: Tab) -> None:
    waiting, text = page.page.evaluate(
        """async () => {
          const { Workers } = await import("./playground/workers.js");
          const { Numbers } = await import("./playground/numbers.js");
          new Numbers(new Workers(String, () => {}), String, () => 5).show();
          const shown = document.querySelectorAll("#numbers b")[1].textContent;
          return [shown, document.querySelector("#strip-text").textContent];
        }"""
    )

    assert waiting == "5"
    assert "0 requests running, 5 waiting" in text


@pytest.mark.slow  # another worker; `make test-browser` runs it
def test_a_drawing_goes_on_when_the_worker_dies_under_it(page: Tab, server: Server) -> None:
    page.draw("a white circle on a green background", num_inference_steps="100", seed="5")
    page.until("document.querySelectorAll('#current img.preview').length === 1")

    os.kill(server.worker(), signal.SIGKILL)

    page.page.get_by_text("shapes: restarting").wait_for()
    page.card("a white circle", within_ms=100_000)  # a worker has to start
    page.page.get_by_text("shapes: ready").wait_for()


@pytest.mark.slow  # another server; `make test-browser` runs it
def test_a_clip_is_made_and_plays(browser: Any) -> None:
    with (
        serving("--api-key", KEY, model="shapes-video") as films,
        tab(browser, films.url, KEY) as opened,
    ):
        opened.page.wait_for_selector("#f-num_frames")
        opened.draw("a red circle moving right", num_inference_steps="4")

        video = opened.card("a red circle").locator("video")
        video.wait_for()
        opened.until("document.querySelector('video').currentTime > 0.1")
        opened.picture("clip")


def test_the_page_and_its_files_say_what_may_run_and_are_all_there(server: Server) -> None:
    answer = server.get("/")
    policy = answer.headers["content-security-policy"]
    scripts = [server.get(f"/playground/{name}.js") for name in ("app", "lanes", "form")]

    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert {one.headers["content-type"] for one in scripts} == {"text/javascript; charset=utf-8"}
    assert server.get("/playground/index.html").status_code == 404
    assert server.get("/playground/..%2f__init__.py").status_code == 404
    assert json.loads(server.get("/playground/none.js").text)["error"]["code"]
