"""The playground on a phone, a laptop and a wide screen, by pointer and by keys alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from support.browser import Tab, tab
from support.server_process import Server, eventually, serving

pytestmark = pytest.mark.timeout(250)
SIZES = {"phone": (390, 844), "laptop": (1366, 768), "wide": (2560, 1440)}
FOCUS = "document.activeElement"


@pytest.fixture(scope="module")
def server(browser: Any) -> Iterator[Server]:
    """Serves the embedded model, and has drawn something already."""
    with serving(model="shapes") as server:
        with server.client() as client:
            body = {"prompt": "a grey ring", "background_job": True, "num_inference_steps": 4}
            client.post("/v1/images/generations", json=body)
        yield server


@pytest.fixture(params=SIZES)
def sized(
    request: pytest.FixtureRequest, browser: Any, server: Server
) -> Iterator[tuple[str, Tab]]:
    name = request.param
    with opened(browser, server, name) as page:
        yield name, page


@pytest.fixture
def laptop(browser: Any, server: Server) -> Iterator[Tab]:
    with opened(browser, server, "laptop") as page:
        yield page


@contextmanager
def opened(browser: Any, server: Server, size: str, **options: Any) -> Iterator[Tab]:
    """A page of a size whose form is there."""
    width, height = SIZES[size]
    options |= {"viewport": {"width": width, "height": height}, "has_touch": size == "phone"}
    with tab(browser, server.url, **options) as page:
        page.page.wait_for_selector("#f-prompt")
        yield page


def in_sight(page: Tab, selector: str) -> bool:
    """Whether all of an element can be seen and hit where the page stands."""
    script = """(node) => {
      const box = node.getBoundingClientRect();
      if (box.top < 0 || box.left < 0 || box.bottom > innerHeight || box.right > innerWidth) return false;
      const hit = document.elementFromPoint(box.left + box.width / 2, box.top + box.height / 2);
      return node === hit || node.contains(hit);
    }"""  # noqa: E501
    return bool(page.page.locator(selector).first.evaluate(script))


def press_until(page: Tab, key: str, condition: str, most: int = 60) -> None:
    """Press a key until a JavaScript condition holds."""
    for _ in range(most):
        if page.page.evaluate(condition):
            return
        page.page.keyboard.press(key)
    raise AssertionError(f"{most} times {key} did not reach: {condition}")


def violations(page: Any) -> list[Any]:
    """What axe finds on a page: rules, and the elements that break them."""
    from axe_playwright_python.sync_playwright import Axe

    rows = Axe().run(page).response["violations"]
    return [(row["id"], [node["html"][:120] for node in row["nodes"]][:3]) for row in rows]


# Both ways


def test_by_pointer_a_drawing_is_made_seen_zoomed_compared_deleted_and_taken_back(
    sized: tuple[str, Tab],
) -> None:
    size, tab = sized
    page = tab.page
    assert in_sight(tab, "#form button[type=submit]")
    red, blue = f"a red circle, {size}", f"a blue square, {size}"
    for prompt in (red, blue):
        tab.draw(prompt, num_inference_steps="8")
        page.locator(f'#current [data-status="completed"][aria-label="{prompt}"]').wait_for()
        assert in_sight(tab, "#current .card-open img")
    tab.picture(f"draw-{size}")

    page.locator("#current .card-open").click()
    page.locator("#detail .layers img").wait_for()
    page.get_by_role("button", name="Larger").click()
    assert page.locator("#detail .layers").evaluate("(n) => n.style.transform").endswith("(1.5)")
    page.get_by_role("button", name="Compare A and B").click()
    page.get_by_role("button", name="The next one").click()
    page.locator(f'#detail .under[alt*="{blue}"]').wait_for()
    assert page.locator("#detail-title").inner_text() == red
    if size != "wide":
        tab.picture(f"compare-{size}")
    page.get_by_role("button", name="Close").click()

    tab.card(blue)
    tab.choose("Delete")
    page.locator(f'#results [title="{blue}"]').wait_for(state="detached")
    page.get_by_role("button", name="Undo").click()
    tab.card(blue)


def test_by_keys_alone_a_drawing_is_made_seen_compared_and_taken_back(laptop: Tab) -> None:
    page = laptop.page
    keys = page.keyboard
    press_until(laptop, "Tab", f"{FOCUS}.id === 'f-prompt'")
    label = "a green ring"
    keys.type(label)
    keys.press("Control+Enter")
    page.locator(f'#current [data-status="completed"][aria-label="{label}"]').wait_for()

    press_until(laptop, "Shift+Tab", f"{FOCUS}.getAttribute('role') === 'option'")
    keys.press("ArrowRight")
    assert page.locator("#results [aria-selected=true]").get_attribute("title") != label
    keys.press("Home")
    keys.press("Enter")
    page.locator("#detail .layers img").wait_for()
    keys.press("+")
    laptop.until("document.querySelector('#detail .layers').style.transform.endsWith('(1.5)')")
    keys.press("ArrowRight")
    laptop.until(f"document.querySelector('#detail-title').textContent !== '{label}'")
    keys.press("Escape")

    press_until(laptop, "Shift+Tab", f"{FOCUS}.textContent === 'Actions'")
    keys.press("Enter")
    press_until(laptop, "ArrowDown", f"{FOCUS}.textContent === 'Delete'", most=8)
    keys.press("Enter")
    page.locator(f'#results [title="{label}"]').wait_for(state="detached")
    laptop.until(f"{FOCUS}.textContent === 'Undo'")
    keys.press("Enter")
    page.locator(f'#results [title="{label}"]').wait_for()


def test_targets_have_forty_pixels_inputs_sixteen_nothing_is_too_wide_and_arrows_choose_views(
    sized: tuple[str, Tab],
) -> None:
    _, tab = sized
    page = tab.page
    page.locator("#current .card").wait_for()
    page.click("text=More settings")
    small = """() => [...document.querySelectorAll("button, input, select, textarea, summary, [role=option], label.inline")]
      .filter((node) => node.checkVisibility({ visibilityProperty: true }))
      .filter((node) => !(node.type === "checkbox" && node.closest("label")) && node.type !== "file")
      .flatMap((node) => {
        const { width, height } = node.getBoundingClientRect();
        const text = ["INPUT", "SELECT", "TEXTAREA"].includes(node.tagName);
        const isSmall = height < 40 || width < 40 || (text && parseFloat(getComputedStyle(node).fontSize) < 16);
        return isSmall ? [`${node.outerHTML.slice(0, 90)}: ${width} x ${height}`] : [];
      })"""  # noqa: E501
    page.focus("#tab-draw")
    for view in ("draw", "gallery", "engine"):
        assert page.locator(f"#tab-{view}").get_attribute("aria-selected") == "true"
        if view == "gallery":
            page.click("#choose")
        assert page.evaluate(small) == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.locator(f"#tab-{view}").press("ArrowRight")
    page.click("#tab-gallery")
    page.locator("#gallery .card-open").first.click()
    page.locator("#detail .layers img").wait_for()
    assert page.evaluate(small) == []


@pytest.mark.parametrize(("size", "scheme"), [("phone", "dark"), ("wide", "light")])
def test_axe_finds_nothing_in_any_view_dialog_or_menu(
    browser: Any, server: Server, scheme: str, size: str
) -> None:
    with opened(browser, server, size, color_scheme=scheme) as tab:
        page = tab.page
        page.locator("#current .card-open img").wait_for()

        def check(place: str) -> list[Any]:
            return [(place, violation) for violation in violations(page)]

        wrong = check("draw")
        page.fill("#f-num_inference_steps", "0")
        page.click("#ride-button")
        page.click("#form button[type=submit]")
        page.get_by_text("Steps must be at least 1").wait_for()
        page.locator("#current").get_by_role("button", name="Actions").click()
        wrong += check("menu and errors")
        page.keyboard.press("Escape")
        page.click("#tab-gallery")
        page.click("#choose")
        wrong += check("gallery")
        page.click("#tab-engine")
        wrong += check("engine")
        page.click("#tab-draw")
        page.locator("#current .card-open").click()
        page.get_by_role("button", name="Compare A and B").click()
        page.locator("#detail .under").wait_for()
        wrong += check("light box")

    assert wrong == []


# The form


def test_the_form_scrolls_by_itself_and_draw_stays_in_sight(laptop: Tab) -> None:
    laptop.page.click("text=More settings")
    for place in ("0", "node.scrollHeight / 2", "node.scrollHeight"):
        laptop.page.locator("#form .scrolling").evaluate(f"(node) => node.scrollTo(0, {place})")
        assert in_sight(laptop, "#form button[type=submit]")
    assert in_sight(laptop, "#f-scheduler")
    assert laptop.page.evaluate("document.documentElement.scrollHeight <= innerHeight")


def test_all_wrong_fields_are_told_at_once_in_the_forms_words(laptop: Tab) -> None:
    laptop.draw("a red circle", width="8", num_inference_steps="0", seed="seven")

    errors = {
        name: laptop.page.inner_text(f"#e-{name}")
        for name in ("width", "num_inference_steps", "seed")
    }
    assert errors == {
        "width": "Width must be a multiple of 16: the nearest is 16.",
        "num_inference_steps": "Steps must be at least 1.",
        "seed": "Seed must be whole numbers, with commas between them.",
    }
    assert laptop.page.locator("#e- button").all_inner_texts() == ["Width", "Steps", "Seed"]
    assert laptop.page.locator("#f-width").get_attribute("aria-invalid") == "true"
    assert laptop.page.locator("#f-width").get_attribute("aria-describedby") == "e-width"
    laptop.picture("error")
    laptop.page.locator("#e- button", has_text="Seed").click()
    assert laptop.page.evaluate(f"{FOCUS}.id") == "f-seed"


def test_what_only_the_server_refuses_is_told_at_once_too(laptop: Tab) -> None:
    laptop.page.click("text=More settings")
    laptop.draw(
        "a red circle", width="1024", height="1024", max_sequence_length="99999",
        true_cfg_scale="1e39",
    )  # fmt: skip

    for name in ("width", "max_sequence_length", "true_cfg_scale"):
        laptop.until(f"document.querySelector('#e-{name}').textContent !== ''")
    text = laptop.page.inner_text("#form")
    assert "max_sequence_length" not in text
    assert "true_cfg_scale" not in text


def test_the_negative_prompt_is_greyed_with_the_reason_until_guidance_counts(laptop: Tab) -> None:
    page = laptop.page
    assert page.locator("#f-negative_prompt").is_disabled()
    page.get_by_text("Does nothing while True guidance is 1.").wait_for()

    page.click("text=Set True guidance to 4")

    assert page.locator("#f-negative_prompt").is_enabled()
    assert page.evaluate(f"{FOCUS}.id") == "f-negative_prompt"
    page.click("text=More settings")
    page.fill("#f-true_cfg_scale", "1")
    assert page.locator("#f-negative_prompt").is_disabled()


def test_sliders_seed_and_sides_work_both_ways(laptop: Tab) -> None:
    page = laptop.page
    slider = page.get_by_label("Steps, as a slider")
    slider.fill("40")
    assert page.input_value("#f-num_inference_steps") == "40"
    page.fill("#f-num_inference_steps", "12")
    assert slider.input_value() == "12"

    page.fill("#f-width", "32")
    page.get_by_role("button", name="Swap width and height").click()
    assert (page.input_value("#f-width"), page.input_value("#f-height")) == ("64", "32")

    keep = page.get_by_role("button", name="Keep")
    page.get_by_role("button", name="Throw a seed").click()
    assert page.input_value("#f-seed").isdigit()
    assert keep.get_attribute("aria-pressed") == "true"
    keep.click()
    assert page.input_value("#f-seed") == ""
    laptop.draw("a white star")
    seed = laptop.card("a white star").locator(".muted").first.inner_text().split()[1]
    keep.click()
    assert page.input_value("#f-seed") == seed


def test_a_draft_outlives_a_reload_and_use_settings_can_be_taken_back(laptop: Tab) -> None:
    page = laptop.page
    laptop.draw("a yellow ring", seed="5", num_inference_steps="6")
    laptop.card("a yellow ring")
    page.fill("#f-prompt", "half a thought")
    page.fill("#f-num_inference_steps", "17")
    page.check("input[value=outlined]")
    page.reload()
    page.wait_for_selector("#f-prompt")

    def form() -> list[Any]:
        return [
            page.input_value("#f-prompt"),
            page.input_value("#f-num_inference_steps"),
            page.is_checked("input[value=outlined]"),
        ]

    assert form() == ["half a thought", "17", True]
    laptop.card("a yellow ring")
    laptop.choose("Use settings")
    assert form() == ["a yellow ring", "6", False]
    page.get_by_role("button", name="Undo").click()
    assert form() == ["half a thought", "17", True]


# Drawings


def test_nothing_comes_to_stand_where_cancel_was(laptop: Tab) -> None:
    page = laptop.page
    laptop.draw("a green square", num_inference_steps="250", seed="1")
    cancel = page.locator("#current .cancel:not(.gone)")
    cancel.wait_for()
    box = cancel.bounding_box()
    laptop.card("a green square")
    at = f"{box['x'] + box['width'] / 2}, {box['y'] + box['height'] / 2}"
    under = f"document.elementFromPoint({at}).closest('button')"

    assert page.evaluate(f"{under} === null")


def test_the_gallery_has_what_the_api_made_and_is_searched_starred_and_chosen_from(
    laptop: Tab, server: Server
) -> None:
    page = laptop.page
    with server.client() as client:
        for prompt in ("a purple star", "an orange star"):
            body = {"prompt": prompt, "background_job": True, "num_inference_steps": 4}
            assert client.post("/v1/images/generations", json=body).status_code == 202
    page.click("#tab-gallery")
    page.fill("#search", "star purple")
    visible = page.locator("#gallery .card:visible")
    laptop.until("document.querySelectorAll('#gallery .card:not([hidden])').length === 1")
    visible.get_by_role("button", name="Favourite").click()
    page.fill("#search", "star")
    laptop.until("document.querySelectorAll('#gallery .card:not([hidden])').length >= 2")
    page.reload()
    page.wait_for_selector("#gallery .card")
    page.click("#favourites")
    laptop.until("document.querySelectorAll('#gallery .card:not([hidden])').length === 1")
    assert visible.get_attribute("aria-label") == "a purple star"
    page.click("#favourites")

    page.fill("#search", "star")
    page.click("#choose")
    page.get_by_label("Choose: a purple star").check()
    page.get_by_label("Choose: an orange star").check()
    page.get_by_text("2 drawings chosen").wait_for()
    laptop.picture("chosen")
    page.locator("#chosen").get_by_role("button", name="Compare").click()
    page.locator('#detail .under[alt*="star"]').wait_for()
    page.keyboard.press("Escape")
    page.locator("#chosen").get_by_role("button", name="Delete").click()
    page.locator('#gallery [aria-label="a purple star"]').wait_for(state="detached")
    page.get_by_role("button", name="Undo").click()
    page.locator('#gallery [aria-label="a purple star"]').wait_for()
    page.get_by_label("Choose: an orange star").check()
    page.locator("#chosen").get_by_role("button", name="Delete").click()
    page.goto("about:blank")  # it is deleted although nobody waits for the time of its undo
    eventually(lambda: "an orange star" not in server.get("/v1/jobs").text, 90, "the deletion")


# The page of the HTTP API


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_a_route_is_tried_on_the_page_of_the_api_and_axe_finds_nothing(
    browser: Any, server: Server, scheme: str
) -> None:
    with tab(browser, server.url + "/docs", color_scheme=scheme) as docs:
        page = docs.page
        assert server.url in page.locator("pre.curl").first.inner_text()
        drawing = page.locator('.try[data-path="/v1/images/generations"]')
        drawing.locator("summary").click()
        drawing.get_by_role("button", name="Send").click()
        drawing.get_by_text("200 after").wait_for()
        drawing.locator("img").wait_for()
        events = page.locator('.try[data-path="/v1/events"]')
        events.locator("summary").click()
        events.get_by_role("button", name="Send").click()
        events.get_by_text("event: status").wait_for()
        events.get_by_role("button", name="Stop").click()
        events.get_by_text("Stopped.").wait_for()
        assert violations(page) == []


def test_a_reference_picture_outlives_a_reload_too(laptop: Tab) -> None:
    page = laptop.page
    page.locator("#current .card-open img").wait_for()
    laptop.choose("Draw with it")
    page.locator(".thumb img").wait_for()
    page.reload()
    page.locator(".thumb img").wait_for()
    laptop.draw("a pink circle", strength="0.7")
    laptop.card("a pink circle").locator(".card-open").click()
    page.locator("#detail td", has_text="image-to-image").wait_for()


def test_a_prompt_in_free_words_is_shown_as_it_was_rewritten(laptop: Tab) -> None:
    laptop.page.locator("details:has(#f-enhance_prompt)").evaluate("(node) => { node.open = true }")
    laptop.page.locator("#f-enhance_prompt").select_option("true")

    laptop.draw("something round and red, with sky behind it", num_inference_steps="8")

    written = laptop.card("something round").locator(".written").inner_text()
    assert written == "→ a red circle on a blue background"
