"""The page in a real browser: it shows the numbers it was given, moves, and asks nothing of anybody.

Hover text has three figures; the explorer's numbers are the trace's within the rounding of their codes.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from made_report import DOTS, LINES, MAP, NASTY, WIDE

READY = "#explorer[data-ready='{}']"


@pytest.fixture
def opened(browser, page_path):
    """Opens the page; after the test, no error was logged and no request was made but for the file itself."""
    said, asked = [], []

    def open_at(width=1280, height=900, **context):
        view = browser.new_context(viewport={"width": width, "height": height}, **context)
        page = view.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(page_path.as_uri())
        page.wait_for_selector(READY.format(0))
        return page

    yield open_at
    for context in browser.contexts:
        context.close()
    assert said == []
    assert {url for url in asked if not url.startswith("data:")} <= {page_path.as_uri()}


def shown(value: float) -> str:
    return f"{float(f'{value:.3g}'):g}"


def tip(page) -> dict[str, str]:
    """The tooltip as {label: value}, with its title under ''."""
    box = page.locator("#tip")
    box.wait_for(state="visible")
    labels, values = box.locator("dt").all_inner_texts(), box.locator("dd").all_inner_texts()
    return {"": box.locator("strong").inner_text(), **dict(zip(labels, values, strict=True))}


def plot(page, title: str):
    return page.locator("figure", has=page.locator("figcaption", has_text=title)).locator(".plot")


def settle(page) -> None:
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def move(page, part: str, value: int) -> None:
    page.locator(f"[data-part={part}]").evaluate(
        "(slider, value) => { slider.value = value; slider.dispatchEvent(new Event('input', {bubbles: true})); }", value
    )
    settle(page)


# Charts


def test_lines_show_the_numbers_of_each_series(opened):
    page = opened()
    lines = plot(page, LINES.title)
    lines.focus()
    for i in range(4):
        page.keyboard.press("ArrowRight")
        told = tip(page)
        assert told[""] == f"layer {i}"
        trained, control, arm = LINES.series
        if trained.y[i] is None:
            assert "mdm · trained" not in told
        else:
            ends = f"[{shown(trained.low[i])}, {shown(trained.high[i])}]"
            assert told["mdm · trained"] == f"{shown(trained.y[i])} {ends}"
        assert told["mdm · untrained"] == shown(control.y[i])
        assert told["arm · trained"] == shown(arm.y[i])
        assert told["uniform"] == "1"
    page.keyboard.press("Escape")
    assert not page.locator("#tip").is_visible()


def test_lines_answer_to_the_pointer_and_the_legend_hides_a_model(opened):
    page = opened()
    lines = plot(page, LINES.title)
    lines.scroll_into_view_if_needed()
    width = lines.bounding_box()["width"]
    lines.hover(position={"x": width - 16, "y": 80})
    assert tip(page)[""] == "layer 3"
    figure = page.locator("figure").first
    assert figure.locator(".plot .control .line").count() == 1
    figure.get_by_role("button", name="mdm").click()
    assert figure.get_by_role("button", name="mdm").get_attribute("aria-pressed") == "false"
    assert figure.locator(".plot .series").count() == 1
    lines.hover(position={"x": 40, "y": 80})
    assert "mdm · trained" not in tip(page)


def test_dots_show_the_numbers_of_each_category(opened):
    page = opened()
    dots = plot(page, "Dots")
    dots.focus()
    for i, category in enumerate(DOTS.categories):
        page.keyboard.press("ArrowDown")
        told = tip(page)
        trained, control = DOTS.series
        assert told[""] == category
        assert told["mdm · trained"] == f"{shown(trained.y[i])} [{shown(trained.low[i])}, {shown(trained.high[i])}]"
        assert told["arm · untrained"] == ("not measured" if control.y[i] is None else shown(control.y[i]))


def test_maps_show_the_number_of_each_cell(opened):
    page = opened()
    cells = plot(page, "Map")
    cells.focus()
    page.keyboard.press("ArrowRight")
    for row, steps in enumerate((("ArrowRight", "ArrowRight"), ("ArrowDown", "ArrowLeft", "ArrowLeft"))):
        columns = [0, 1, 2] if row == 0 else [2, 1, 0]
        keys = ["", *steps] if row == 0 else list(steps)
        for column, key in zip(columns, keys, strict=True):
            if key:
                page.keyboard.press(key)
            told, value = tip(page), MAP.values[row][column]
            assert told[""] == f"step {row}, key {column}"
            assert told["× uniform"] == ("not measured" if value is None else shown(value))
    assert told["marked"] == "committed"


def test_a_map_wider_than_the_screen_keeps_every_number(opened):
    page = opened()
    cells = plot(page, WIDE.title)
    cells.scroll_into_view_if_needed()
    box = cells.bounding_box()
    cells.hover(position={"x": box["width"] * 0.7, "y": box["height"] / 2})
    told = tip(page)
    column = int(re.search(r"key (\d+)", told[""])[1])
    assert told["value"] == shown(WIDE.values[1][column])


def test_a_table_is_a_table(opened):
    page = opened()
    rows = [row.split("\t") for row in page.locator("table tr").all_inner_texts()]
    assert rows == [["class", "n", "share"], ["newline", "3", "0.125"], ["<i>bos</i>", "4", "–"]]


# Explorer


def number(text: str) -> float:
    return float(text.split()[0].replace(",", ""))


def token_tip(page, position: int) -> dict[str, str]:
    token = page.locator(f".canvas [data-p='{position}']")
    token.evaluate("(token) => token.focus()")
    settle(page)
    return tip(page)


@pytest.mark.parametrize(("run", "index"), [("mdm", 0), ("arm", 1)])
def test_sliders_move_the_canvas_and_its_numbers_are_the_traces(opened, request, run, index):
    trace = request.getfixturevalue(run)
    page = opened()
    page.locator("[data-part=run]").select_option(run)
    page.wait_for_selector(READY.format(index))
    steps = len(trace.arrays["tokens"])
    for step, layer in ((0, 0), (steps - 1, 3), (steps // 2, 7)):
        move(page, "step", step)
        move(page, "layer", layer)
        assert page.locator("#explorer").get_attribute("data-step") == str(step)
        assert page.locator("#explorer").get_attribute("data-layer") == str(layer)
        lift = trace.received(layer, scale="lift", eligible=True)[step]
        percent = trace.received(layer, scale="percent")[step]
        (anchor,) = page.locator(".canvas .anchor").evaluate_all("(all) => all.map((token) => Number(token.dataset.p))")
        assert anchor == trace.top_key(layer)[step]
        states = np.array(["absent", "prompt", "masked", "committed"])[trace.arrays["states"][step]]
        classes = page.locator(".canvas .t").evaluate_all("(all) => all.map((token) => token.className)")
        assert all(state in name.split() for state, name in zip(states, classes, strict=False))
        for position in {0, 1, 7, int(anchor), int(trace.arrays["keys"][step]) - 1}:
            told = token_tip(page, position)
            assert told[""].startswith(f"position {position}: ")
            if np.isnan(lift[position]):
                assert told.get("lift", "not ranked").startswith("not ranked")
            else:
                assert number(told["lift"]) == pytest.approx(lift[position], rel=0.017)
                assert number(told["received"]) == pytest.approx(percent[position], rel=0.017)


def test_a_mask_does_not_tell_what_will_be_written_there(opened, mdm):
    page = opened()
    written = mdm.arrays["commit_position"][mdm.arrays["commit_step"] > 0].tolist()
    for position in written:
        assert token_tip(page, position)[""] == f"position {position}: a mask"
        hidden = page.locator(f".canvas [data-p='{position}']").evaluate("(token) => getComputedStyle(token).color")
        assert hidden == "rgba(0, 0, 0, 0)"


def test_fresh_commits_are_marked_and_written(opened, mdm):
    page = opened()
    for step in range(len(mdm.arrays["tokens"])):
        move(page, "step", step)
        fresh = page.locator(".canvas .fresh")
        positions = fresh.evaluate_all("(all) => all.map((token) => Number(token.dataset.p))")
        assert positions == sorted(mdm.arrays["commit_position"][mdm.arrays["commit_step"] == step].tolist())
    told = token_tip(page, positions[0])
    assert told["state"].startswith("masked, written by this step (confidence ")
    assert told["region"] == "answer"


def test_play_goes_to_the_last_step_and_stops(opened, mdm):
    page = opened()
    page.get_by_role("button", name="Play").click()
    page.get_by_role("button", name="Pause").wait_for()
    last = len(mdm.arrays["tokens"]) - 1
    page.wait_for_selector(f"#explorer[data-step='{last}']", timeout=10_000)
    page.get_by_role("button", name="Play").wait_for()


def test_keys_step_change_layers_play_and_walk_over_tokens(opened, mdm):
    page = opened()
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
        settle(page)
        assert where() == expected
    page.keyboard.press("a")
    anchor = int(mdm.top_key(4)[1])
    assert tip(page)[""].startswith(f"position {anchor}: ")
    page.keyboard.press("Shift+ArrowRight")
    assert tip(page)[""].startswith(f"position {anchor + 1}: ")
    before = tip(page)["lift"]
    page.keyboard.press("ArrowUp")
    settle(page)
    assert tip(page)[""].startswith(f"position {anchor + 1}: ")  # the tooltip stays and follows the layer
    assert tip(page)["lift"] != before
    page.keyboard.press(" ")
    page.get_by_role("button", name="Pause").wait_for()
    page.keyboard.press(" ")
    page.get_by_role("button", name="Play").wait_for()


def test_a_head_shows_its_top_keys(opened, mdm):
    page = opened()
    page.locator("[data-part=head]").select_option("2")
    move(page, "step", 1)
    group = mdm.coords["group"].index("all")
    keys = mdm.arrays["top_key"][1, 4, 2, group, :4].tolist()
    lifts = mdm.arrays["top"][1, 4, 2, group, :4, 0].tolist()
    for rank, (key, lift) in enumerate(zip(keys, lifts, strict=True), 1):
        told = token_tip(page, key)["lift, head 2"]
        assert told.endswith(f"rank {rank}")
        assert number(told) == pytest.approx(lift, rel=0.03)
    other = next(p for p in range(20) if p not in keys)
    assert token_tip(page, other)["lift, head 2"] == "not among its top keys"
    assert "4 top keys" in page.locator("[data-part=note]").inner_text()


def test_colours_follow_the_numbers(opened, mdm):
    page = opened()
    move(page, "step", 2)
    for colour in ("lift", "percent"):
        page.locator("[data-part=colour]").select_option(colour)
        settle(page)
        levels = page.locator(".canvas .t").evaluate_all(
            "(all) => all.map((t) => Number(t.className.match(/l(\\d+)/)[1]))"
        )
        lift = mdm.received(4, scale="lift")[2]
        order = np.argsort(lift)
        assert (np.diff(np.array(levels)[order]) >= 0).all()
        assert max(levels) == levels[int(lift.argmax())] > 50


def test_the_map_shows_numbers_and_goes_to_a_step(opened, mdm):
    page = opened()
    strip = page.locator("[data-part=strip]")
    strip.scroll_into_view_if_needed()
    box = strip.bounding_box()
    strip.hover(position={"x": box["width"] / 2, "y": box["height"] / 2})
    told = tip(page)
    step, key = map(int, re.findall(r"\d+", told[""]))
    assert number(told["lift"]) == pytest.approx(mdm.received(4, scale="lift")[step, key], rel=0.017)
    strip.click(position={"x": box["width"] / 2, "y": box["height"] / 2})
    page.wait_for_selector(f"#explorer[data-step='{step}']")


def test_tokens_that_look_like_html_are_text(opened, mdm):
    page = opened()
    texts = page.locator(".canvas .t").all_text_contents()
    ids = mdm.arrays["tokens"][0].tolist()
    firsts = [ids.index(token) for token in dict.fromkeys(ids)][: len(NASTY)]
    assert [texts[p] for p in firsts] == [*NASTY[:-1], "⏎"]
    assert page.locator(".canvas script, .canvas img, .canvas b").count() == 0
    assert page.title() == "A </title> of <b>floats</b>"
    assert token_tip(page, firsts[1])[""] == f"position {firsts[1]}: “{NASTY[1].replace(' ', '␣')}”"
    assert page.locator("[data-part=sample] option").all_text_contents() == ["<b>mdm</b>"]


# The page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 900, 1600])
def test_no_width_scrolls_sideways(opened, width, scheme):
    page = opened(width=width, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground))) > 382) == (scheme == "light")


def test_the_button_turns_light_to_dark_and_paper_is_light(opened):
    page = opened(color_scheme="light")
    ground = lambda: page.evaluate("getComputedStyle(document.body).backgroundColor")  # noqa: E731
    light = ground()
    page.locator("#theme").click()
    assert ground() != light
    assert page.locator("details[open]").count() == 0
    page.emulate_media(media="print")
    assert ground() == "rgb(255, 255, 255)"
    page.wait_for_function("() => !document.querySelector('details:not([open])')")
    assert len(page.pdf()) > 50_000


def test_contents_lead_to_sections(opened):
    page = opened()
    for link in page.locator("#contents a").all():
        assert page.locator(link.get_attribute("href")).count() == 1
