"""The page is one safe file: tokens and labels are always text, and it never uses the network."""

from __future__ import annotations

import base64
import hashlib
import json
import re

import pytest
from example_charts import UNSAFE_TEXTS

from floatscope.errors import UserError, escape_controls
from floatscope.reports.charts import Model, Report, Section, Table
from floatscope.reports.page import embed_json, format_value, render_bold, render_page, write_page
from floatscope.schema import Paradigm


@pytest.fixture(scope="module")
def html(page_path):
    return page_path.read_text(encoding="utf-8")


def find_blocks(html: str, tag: str) -> list[str]:
    return re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", html, re.DOTALL)


def test_tokens_cannot_escape_their_json(html, report):
    scripts = find_blocks(html, "script")
    assert len(scripts) == 1 + len(report.explorer) + 1  # the data, the samples, the one script that runs
    for text, sample in zip(scripts[1:-1], report.explorer, strict=True):
        assert not set("<>&\u2028\u2029") & set(text)
        assert text.isascii()
        pieces = {token: escape_controls(piece) for token, piece in sample["pieces"].items()}
        assert json.loads(text) == sample | {"pieces": pieces}
    pieces = json.loads(scripts[1])["pieces"].values()
    assert set(map(escape_controls, UNSAFE_TEXTS)) <= set(pieces)


@pytest.mark.parametrize("c", "\u061c\u200e\u202a\u202e\u2066\u2069\x07\x1b\x7f\x9b")
def test_control_characters_are_spelled_out_everywhere(c):
    """As text of the page, and in the data that its scripts show as text."""
    name, shown = f"a{c}b", f"a{ascii(c)[1:-1]}b"
    section = Section("s", name, name, name, [Table([name], [[name]], name)])
    report = Report(name, [name], [Model(name, Paradigm.MDM, 1, name)], [section])
    page = render_page(report)
    assert c not in page
    assert page.count(shown) >= 7
    assert json.loads(embed_json([name, {name: 1.5}, "\\" + c, "é\n\t<&\"\\u202e"])) == [
        shown, {shown: 1.5}, "\\" + shown[1:-1], "é\n\t<&\"\\u202e"
    ]  # fmt: skip


def test_labels_are_escaped(html):
    assert "<b>" not in html.split("<script")[0]
    assert "&lt;b&gt;no tags&lt;/b&gt;" in html
    assert "<title>A &lt;/title&gt; of" in html
    assert "<i>bos" not in html


def test_policy_allows_only_this_script_and_this_style(html):
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]+)"', html)
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    for kind, text in (("script-src", find_blocks(html, "script")[-1]), ("style-src", find_blocks(html, "style")[0])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[kind] == f"'sha256-{digest}'"
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert not re.search(r"\son\w+=|javascript:|\sstyle=", html.split("<script")[0])


def test_page_links_no_other_site(html):
    assert not re.search(r"https?:", html.replace("http://www.w3.org/2000/svg", ""))


def test_table_is_linked_if_its_file_exists(html):
    assert 'href="tables/lines.csv"' in html
    assert "absent.csv" not in html


def test_text_is_escaped_and_numbers_do_not_wrap():
    assert str(render_bold("**5 %** [4, 6] <b>")) == "<strong>5\u00a0%</strong> [4,\u00a06] &lt;b&gt;"
    assert str(render_bold("n = 24, z = x")) == "n\u00a0=\u00a024, z = x"
    assert str(render_bold("0.2 [0.1, 0.3]")) == "0.2\u00a0[0.1,\u00a00.3]"
    assert [format_value(v) for v in (None, True, 0.12345, 12345.6, 3, ["a", 1], {"a": 1})] == [
        "–", "yes", "0.123", "1.235e+04", "3", "a, 1", '{"a": 1}',
    ]  # fmt: skip


def test_numbers_without_json_form_are_refused():
    with pytest.raises(ValueError, match="not JSON compliant"):
        embed_json({"x": float("nan")})


def test_empty_report_is_a_page(tmp_path):
    empty = Report("Empty", [], [], [Section("s", "", "", "", [Table(["a"], [])])])
    assert 'id="explorer"' not in render_page(empty)
    assert write_page(empty, tmp_path / "a.html").stat().st_size > 10_000


def test_unwritable_path_is_named(report, tmp_path):
    with pytest.raises(UserError, match=r"cannot write the report to .*absent/report.html: No such file or directory"):
        write_page(report, tmp_path / "absent" / "report.html")


def test_failed_write_leaves_the_old_page(report, tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("old")
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(UserError, match="No space left on device"):
        write_page(report, path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
