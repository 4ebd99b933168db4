"""Calls are parsed and never evaluated; other text is refused with a remedy."""

from __future__ import annotations

import pytest

from floatscope.errors import UserError
from floatscope.syntax import format_call, merge_arguments, parse_call

REMEDY = "write a name, or a name with arguments, as in threshold(tau=0.95)"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("confidence", ("confidence", {})),
        ("  confidence\n", ("confidence", {})),
        ("eb()", ("eb", {})),
        ("threshold(tau=0.95)", ("threshold", {"tau": 0.95})),
        ("threshold( tau = 1 , )", ("threshold", {"tau": 1})),
        ("klass(confidence=.6, kl=1e-3, history=2)", ("klass", {"confidence": 0.6, "kl": 0.001, "history": 2})),
        ("pc(background='a b.json')", ("pc", {"background": "a b.json"})),
        ('pc(background="C:/x.json")', ("pc", {"background": "C:/x.json"})),
        ("f(a=-1, b=+2.5)", ("f", {"a": -1, "b": 2.5})),
        ("f(a=None, b=True, c=False)", ("f", {"a": None, "b": True, "c": False})),
        ("f(a=[1, 2], b=(3,), c={'k': [4]})", ("f", {"a": [1, 2], "b": (3,), "c": {"k": [4]}})),
        ("f(a='')", ("f", {"a": ""})),
        ("f(a='Grüße')", ("f", {"a": "Grüße"})),
        ("f(a=')')", ("f", {"a": ")"})),
        ("f(a='__import__(\"os\")')", ("f", {"a": '__import__("os")'})),  # a text is only a text
        ("f(\n  a=1,\n  b=2,\n)", ("f", {"a": 1, "b": 2})),
    ],
)
def test_names_and_literal_arguments_are_parsed(text, expected):
    assert parse_call(text) == expected


@pytest.mark.parametrize("text", ["threshold(tau=0.95)", "f(a=1, b='x')"])
def test_a_call_survives_the_round_trip(text):
    name, values = parse_call(text)
    assert parse_call(format_call(name, values)) == (name, values)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        "3",
        "'confidence'",
        "None",
        "threshold(0.95)",
        "threshold(0.95, tau=1)",
        "threshold(*[0.95])",
        "threshold(tau=)",
        "threshold(tau=0.95",
        "threshold tau=0.95",
        "threshold(tau=x)",
        "threshold(tau=1 if True else 2)",
        "threshold(tau=1+1)",
        "threshold(tau=[i for i in range(3)])",
        "threshold(tau=lambda: 1)",
        "threshold(tau=f'{1}')",
        "threshold(tau=(x := 1))",
        "__import__('os')",
        "__import__('os').system('true')",
        "f(a=__import__('os'))",
        "f(a=open('/etc/passwd').read())",
        "f(a=().__class__)",
        "f(a=1)(b=2)",
        "f.g(a=1)",
        "f[0](a=1)",
        "f(a=1); g",
        "f\ng",
        "import os",
        "x = 1",
        "lambda: 1",
        "await f",
        "f and g",
        "# f",
        "f(a=\0)",
        "\0",
        "\ud800",
        "f(a='\ud800')",
    ],
)
def test_other_text_is_refused_with_a_remedy(text):
    with pytest.raises(UserError) as error:
        parse_call(text)
    assert str(error.value) == f"cannot read {text!r}: {REMEDY}"


@pytest.mark.parametrize(
    "text",
    [
        "f(a=" + "(" * 500 + "1" + ")" * 500 + ")",
        "f(a=" + "[" * 5000 + "]" * 5000 + ")",
        "f(a=" + "-" * 100_000 + "1)",
        "f(a=" + "1+" * 50_000 + "1)",
        "f(a=" + "9" * 10_000 + ")",
        "f(a={" * 400,
        "a." * 50_000 + "b",
        "(" * 100_000,
        "f(" + "a" * 100_000,
    ],
    ids=lambda text: f"{text[:8]}… {len(text)}",
)
def test_deep_and_huge_texts_are_refused(text):
    with pytest.raises(UserError, match="cannot read"):
        parse_call(text)


def test_no_code_is_run(tmp_path):
    witness = tmp_path / "ran"
    for text in (
        f"f(a=open({str(witness)!r}, 'w'))",
        f"open({str(witness)!r}, 'w')",
        f"f(a=[open({str(witness)!r}, 'w')])",
        f"f(**open({str(witness)!r}, 'w'))",
    ):
        try:
            parse_call(text)
        except UserError:
            continue
    assert not witness.exists()


@pytest.mark.parametrize("text", ["f(**{'tau': 0.5})", "f(a=1, **{'b': 2})"])
def test_starred_arguments_are_refused(text):
    with pytest.raises(UserError, match="cannot read"):
        parse_call(text)


def test_a_repeated_argument_is_refused():
    with pytest.raises(UserError):
        parse_call("threshold(tau=0.5, tau=0.9)")


@pytest.mark.parametrize("text", ["f(a={[]: 1})", "f(a={[1]})", "f(a={{}: 1})"])
def test_a_literal_that_cannot_be_built_is_refused(text):
    with pytest.raises(UserError, match="cannot read"):
        parse_call(text)


# ---- arguments


def test_an_argument_replaces_its_default():
    defaults = {"confidence": 0.6, "kl": 0.015, "history": 2}
    assert merge_arguments("sampler", "klass", {"kl": 0.1}, defaults) == {"confidence": 0.6, "kl": 0.1, "history": 2}
    assert defaults["kl"] == 0.015
    assert merge_arguments("sampler", "klass", {}, defaults) == defaults


@pytest.mark.parametrize("value", [1, 0, -3, 2.5])
def test_a_whole_number_is_accepted_as_a_number(value):
    assert merge_arguments("sampler", "threshold", {"tau": value}, {"tau": 0.9}) == {"tau": value}


@pytest.mark.parametrize("value", ["x", None, True, [1], (1,), {}, 1 + 2j, b"1"], ids=repr)
def test_other_values_are_refused_if_the_default_is_a_number(value):
    with pytest.raises(UserError) as error:
        merge_arguments("sampler", "threshold", {"tau": value}, {"tau": 0.9})
    assert str(error.value) == f"sampler 'threshold' takes a number for tau, got {value!r}"


def test_an_unknown_argument_suggests_the_closest_name():
    with pytest.raises(UserError) as error:
        merge_arguments("sampler", "klass", {"historie": 3}, {"confidence": 0.6, "history": 2})
    assert str(error.value) == (
        "unknown argument of sampler 'klass' 'historie' (did you mean 'history'?); allowed: confidence, history"
    )


def test_a_name_without_arguments_refuses_them():
    with pytest.raises(UserError) as error:
        merge_arguments("sampler", "random", {"seed": 3}, {})
    assert str(error.value) == "sampler 'random' takes no arguments, got seed=3"


def test_a_default_of_none_accepts_any_value():
    assert merge_arguments("sampler", "pc", {"background": "x.json"}, {"background": None}) == {"background": "x.json"}
