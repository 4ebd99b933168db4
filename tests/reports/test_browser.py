"""The page in a real browser: it shows its numbers, reacts to the reader, and never uses the network.

Tooltips have three significant digits; the numbers of the explorer are those of the trace, rounded to their codes.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from example_charts import DOTS, LINES, MAP, UNSAFE_TEXTS, WIDE_MAP

from floatscope.errors import escape_controls

READY = "#explorer[data-ready='{}']"


@pytest.fixture
def open_page(browser, page_path):
    """Open the page; after the test, check that nothing was logged and that only the file itself was requested."""
    messages, requests = [], []

    def open_with(width=1280, height=900, **context):
        view = browser.new_context(viewport={"width": width, "height": height}, **context)
        page = view.new_page()
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(page_path.as_uri())
        page.wait_for_selector(READY.format(0))
        return page

    yield open_with
    for context in browser.contexts:
        context.close()
    assert messages == []
    assert {url for url in requests if not url.startswith("data:")} <= {page_path.as_uri()}


def format_number(value: float) -> str:
    return f"{float(f'{value:.3g}'):g}"


def read_tip(page) -> dict[str, str]:
    """The tooltip as {label: value}, with its title under ''."""
    box = page.locator("#tip")
    box.wait_for(state="visible")
    labels, values = box.locator("dt").all_inner_texts(), box.locator("dd").all_inner_texts()
    return {"": box.locator("strong").inner_text(), **dict(zip(labels, values, strict=True))}


def find_plot(page, title: str):
    return page.locator("figure", has=page.locator("figcaption", has_text=title)).locator(".plot")


def wait_for_frames(page) -> None:
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def set_slider(page, part: str, value: int) -> None:
    page.locator(f"[data-part={part}]").evaluate(
        "(slider, value) => { slider.value = value; slider.dispatchEvent(new Event('input', {bubbles: true})); }", value
    )
    wait_for_frames(page)


# Charts


def test_lines_show_the_numbers_of_each_series(open_page):
    page = open_page()
    lines = find_plot(page, LINES.title)
    lines.focus()
    for i in range(4):
        page.keyboard.press("ArrowRight")
        tip = read_tip(page)
        assert tip[""] == f"layer {i}"
        trained, control, arm = LINES.series
        if trained.y[i] is None:
            assert "mdm · trained" not in tip
        else:
            ends = f"[{format_number(trained.low[i])}, {format_number(trained.high[i])}]"
            assert tip["mdm · trained"] == f"{format_number(trained.y[i])} {ends}"
        assert tip["mdm · untrained"] == format_number(control.y[i])
        assert tip["arm · trained"] == format_number(arm.y[i])
        assert tip["uniform"] == "1"
    page.keyboard.press("Escape")
    assert not page.locator("#tip").is_visible()


def test_lines_follow_the_pointer_and_the_legend_hides_a_model(open_page):
    page = open_page()
    lines = find_plot(page, LINES.title)
    lines.scroll_into_view_if_needed()
    width = lines.bounding_box()["width"]
    lines.hover(position={"x": width - 16, "y": 80})
    assert read_tip(page)[""] == "layer 3"
    figure = page.locator("figure").first
    assert figure.locator(".plot .control .line").count() == 1
    figure.get_by_role("button", name="mdm").click()
    assert figure.get_by_role("button", name="mdm").get_attribute("aria-pressed") == "false"
    assert figure.locator(".plot .series").count() == 1
    lines.hover(position={"x": 40, "y": 80})
    assert "mdm · trained" not in read_tip(page)


def test_dots_show_the_numbers_of_each_category(open_page):
    page = open_page()
    dots = find_plot(page, "Dots")
    dots.focus()
    for i, category in enumerate(DOTS.categories):
        page.keyboard.press("ArrowDown")
        tip = read_tip(page)
        trained, control = DOTS.series
        assert tip[""] == category
        mean, low, high = (format_number(values[i]) for values in (trained.y, trained.low, trained.high))
        assert tip["mdm · trained"] == f"{mean} [{low}, {high}]"
        assert tip["arm · untrained"] == ("not measured" if control.y[i] is None else format_number(control.y[i]))


def test_maps_show_the_number_of_each_cell(open_page):
    page = open_page()
    cells = find_plot(page, "Map")
    cells.focus()
    page.keyboard.press("ArrowRight")
    for row, steps in enumerate((("ArrowRight", "ArrowRight"), ("ArrowDown", "ArrowLeft", "ArrowLeft"))):
        columns = [0, 1, 2] if row == 0 else [2, 1, 0]
        keys = ["", *steps] if row == 0 else list(steps)
        for column, key in zip(columns, keys, strict=True):
            if key:
                page.keyboard.press(key)
            tip, value = read_tip(page), MAP.values[row][column]
            assert tip[""] == f"step {row}, key {column}"
            assert tip["× uniform"] == ("not measured" if value is None else format_number(value))
    assert tip["mark"] == "committed"


def test_map_wider_than_the_screen_shows_every_number(open_page):
    page = open_page()
    cells = find_plot(page, WIDE_MAP.title)
    cells.scroll_into_view_if_needed()
    box = cells.bounding_box()
    cells.hover(position={"x": box["width"] * 0.7, "y": box["height"] / 2})
    tip = read_tip(page)
    column = int(re.search(r"key (\d+)", tip[""])[1])
    assert tip["value"] == format_number(WIDE_MAP.values[1][column])


def test_table_shows_its_cells(open_page):
    page = open_page()
    rows = [row.split("\t") for row in page.locator("table tr").all_inner_texts()]
    assert rows == [["class", "n", "share"], ["newline", "3", "0.125"], ["<i>bos</i>", "4", "–"]]


# Explorer


def parse_number(text: str) -> float:
    return float(text.split()[0].replace(",", ""))


def read_token_tip(page, position: int) -> dict[str, str]:
    token = page.locator(f".canvas [data-p='{position}']")
    token.evaluate("(token) => token.focus()")
    wait_for_frames(page)
    return read_tip(page)


@pytest.mark.parametrize(("run", "index"), [("mdm", 0), ("arm", 1)])
def test_sliders_move_the_canvas_and_show_the_numbers_of_the_trace(open_page, request, run, index):
    trace = request.getfixturevalue(run)
    page = open_page()
    page.locator("[data-part=run]").select_option(run)
    page.wait_for_selector(READY.format(index))
    steps = len(trace.arrays["tokens"])
    with_anchor = np.argwhere(trace.anchor_path() >= 0)[-1].tolist()
    for step, layer in ((0, 0), (steps - 1, 3), (steps // 2, 7), with_anchor):
        set_slider(page, "step", step)
        set_slider(page, "layer", layer)
        assert page.locator("#explorer").get_attribute("data-step") == str(step)
        assert page.locator("#explorer").get_attribute("data-layer") == str(layer)
        lift = trace.received(layer, scale="lift", eligible=True)[step]
        percent = trace.received(layer, scale="percent")[step]
        top_key = int(trace.anchor_path(layer)[step])
        marked = page.locator(".canvas .top").evaluate_all("(all) => all.map((token) => Number(token.dataset.p))")
        assert marked == [top_key] * (top_key >= 0)
        status = page.locator("[data-part=status]").inner_text()
        assert (f"position {top_key}, " if top_key >= 0 else "none, no key has a lift of 2 or more") in status
        states = np.array(["absent", "prompt", "masked", "committed"])[trace.arrays["states"][step]]
        classes = page.locator(".canvas .t").evaluate_all("(all) => all.map((token) => token.className)")
        assert all(state in name.split() for state, name in zip(states, classes, strict=False))
        for position in {0, 1, 7, max(0, top_key), int(trace.arrays["keys"][step]) - 1}:
            tip = read_token_tip(page, position)
            assert tip[""].startswith(f"position {position}: ")
            if np.isnan(lift[position]):
                assert tip.get("lift", "not ranked").startswith("not ranked")
            else:
                assert parse_number(tip["lift"]) == pytest.approx(lift[position], rel=0.017)
                assert parse_number(tip["received"]) == pytest.approx(percent[position], rel=0.017)


def test_mask_does_not_reveal_its_future_token(open_page, mdm):
    page = open_page()
    written = mdm.arrays["commit_position"][mdm.arrays["commit_step"] > 0].tolist()
    for position in written:
        assert read_token_tip(page, position)[""] == f"position {position}: a mask"
        hidden = page.locator(f".canvas [data-p='{position}']").evaluate("(token) => getComputedStyle(token).color")
        assert hidden == "rgba(0, 0, 0, 0)"


def test_new_commits_are_marked_and_shown(open_page, mdm):
    page = open_page()
    for step in range(len(mdm.arrays["tokens"])):
        set_slider(page, "step", step)
        commits = page.locator(".canvas .new")
        positions = commits.evaluate_all("(all) => all.map((token) => Number(token.dataset.p))")
        assert positions == sorted(mdm.arrays["commit_position"][mdm.arrays["commit_step"] == step].tolist())
    tip = read_token_tip(page, positions[0])
    assert tip["state"].startswith("masked, committed at this step (confidence ")
    assert tip["region"] == "answer"


def test_play_goes_to_the_last_step_and_stops(open_page, mdm):
    page = open_page()
    page.get_by_role("button", name="Play").click()
    page.get_by_role("button", name="Pause").wait_for()
    last = len(mdm.arrays["tokens"]) - 1
    page.wait_for_selector(f"#explorer[data-step='{last}']", timeout=10_000)
    page.get_by_role("button", name="Play").wait_for()


def test_keyboard_changes_step_layer_and_token_and_plays(open_page, mdm):
    page = open_page()
    explorer = page.locator("#explorer")
    where = lambda: (int(explorer.get_attribute("data-step")), int(explorer.get_attribute("data-layer")))  # noqa: E731
    page.locator("[data-part=text]").focus()
    for key, expected in (
        ("ArrowRight", (1, 4)),
        ("ArrowRight", (2, 4)),
        ("ArrowLeft", (1, 4)),
        ("ArrowUp", (1, 5)),
        ("ArrowDown", (1, 4)),
    ):
        page.keyboard.press(key)
        wait_for_frames(page)
        assert where() == expected
    page.keyboard.press("a")
    top_key = int(mdm.top_key(4)[1])
    assert read_tip(page)[""].startswith(f"position {top_key}: ")
    page.keyboard.press("Shift+ArrowRight")
    assert read_tip(page)[""].startswith(f"position {top_key + 1}: ")
    before = read_tip(page)["lift"]
    page.keyboard.press("ArrowUp")
    wait_for_frames(page)
    assert read_tip(page)[""].startswith(f"position {top_key + 1}: ")  # the tooltip stays and follows the layer
    assert read_tip(page)["lift"] != before
    page.keyboard.press(" ")
    page.get_by_role("button", name="Pause").wait_for()
    page.keyboard.press(" ")
    page.get_by_role("button", name="Play").wait_for()


def test_head_shows_its_top_keys(open_page, mdm):
    page = open_page()
    page.locator("[data-part=head]").select_option("2")
    set_slider(page, "step", 1)
    group = mdm.coords["group"].index("all")
    keys = mdm.arrays["top_key"][1, 4, 2, group, :4].tolist()
    lifts = mdm.arrays["top"][1, 4, 2, group, :4, 0].tolist()
    for rank, (key, lift) in enumerate(zip(keys, lifts, strict=True), 1):
        tip = read_token_tip(page, key)["lift, head 2"]
        assert tip.endswith(f"rank {rank}")
        assert parse_number(tip) == pytest.approx(lift, rel=0.03)
    other = next(p for p in range(20) if p not in keys)
    assert read_token_tip(page, other)["lift, head 2"] == "not among its top keys"
    assert "4 top keys" in page.locator("[data-part=note]").inner_text()


def test_colours_follow_the_numbers(open_page, mdm):
    page = open_page()
    set_slider(page, "step", 2)
    for colour in ("lift", "percent"):
        page.locator("[data-part=colour]").select_option(colour)
        wait_for_frames(page)
        levels = page.locator(".canvas .t").evaluate_all(
            "(all) => all.map((t) => Number(t.className.match(/l(\\d+)/)[1]))"
        )
        lift = mdm.received(4, scale="lift")[2]
        order = np.argsort(lift)
        assert (np.diff(np.array(levels)[order]) >= 0).all()
        assert max(levels) == levels[int(lift.argmax())] > 50


def test_map_shows_numbers_and_goes_to_a_step(open_page, mdm):
    page = open_page()
    strip = page.locator("[data-part=strip]")
    strip.scroll_into_view_if_needed()
    box = strip.bounding_box()
    strip.hover(position={"x": box["width"] / 2, "y": box["height"] / 2})
    tip = read_tip(page)
    step, key = map(int, re.findall(r"\d+", tip[""]))
    assert parse_number(tip["lift"]) == pytest.approx(mdm.received(4, scale="lift")[step, key], rel=0.017)
    strip.click(position={"x": box["width"] / 2, "y": box["height"] / 2})
    page.wait_for_selector(f"#explorer[data-step='{step}']")


def test_tokens_that_look_like_html_are_text(open_page, mdm):
    page = open_page()
    texts = page.locator(".canvas .t").all_text_contents()
    ids = mdm.arrays["tokens"][0].tolist()
    firsts = [ids.index(token) for token in dict.fromkeys(ids)][: len(UNSAFE_TEXTS)]
    assert [texts[p] for p in firsts] == [*map(escape_controls, UNSAFE_TEXTS[:-1]), "⏎"]
    assert page.locator(".canvas script, .canvas img, .canvas b").count() == 0
    assert page.title() == "A </title> of <b>floats</b>"
    assert read_token_tip(page, firsts[1])[""] == f"position {firsts[1]}: “{UNSAFE_TEXTS[1].replace(' ', '␣')}”"
    assert page.locator("[data-part=sample] option").all_text_contents() == ["<b>mdm</b>"]


# The page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 900, 1600])
def test_page_never_scrolls_sideways(open_page, width, scheme):
    page = open_page(width=width, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground))) > 382) == (scheme == "light")


def test_button_switches_to_dark_and_print_is_light(open_page):
    page = open_page(color_scheme="light")
    ground = lambda: page.evaluate("getComputedStyle(document.body).backgroundColor")  # noqa: E731
    light = ground()
    page.locator("#theme").click()
    assert ground() != light
    assert page.locator("details[open]").count() == 0
    page.emulate_media(media="print")
    assert ground() == "rgb(255, 255, 255)"
    page.wait_for_function("() => !document.querySelector('details:not([open])')")
    assert len(page.pdf()) > 50_000


def test_contents_link_to_sections(open_page):
    page = open_page()
    for link in page.locator("#contents a").all():
        assert page.locator(link.get_attribute("href")).count() == 1
