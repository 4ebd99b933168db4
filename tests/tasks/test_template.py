"""Templates: what is written, where everything stands, what is refused, and the question in other places."""

from __future__ import annotations

from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floatscope.errors import UserError
from floatscope.tasks.prompt import prompt_of, tokens_of
from floatscope.tasks.sample import Passage, Sample
from floatscope.tasks.template import PLACES, TEMPLATES, USUAL, Template, placed, template

MIRA = Passage("Mira", "Mira lives in Velmora.", True, ((14, 21),))
JON = Passage("Jon", "Jon keeps a {cow}.")
ASKED = Sample("a", "Where does {Mira} live?", ("Velmora", "there"), (JON, MIRA))
SHOT = Sample("s", "Who keeps a cow?", ("Jon", "he"), (JON,))
ALONE = Sample("b", "Who?", ("Jon",))


def said(prompt, region):
    return [prompt.text[a:b] for a, b in prompt.spans[region]]


def is_covered(prompt):
    spans = [s for name, found in prompt.spans.items() if name not in ("gold", "evidence") for s in found]
    ordered = sorted(spans)
    ends = [0, *(stop for _, stop in ordered)]
    return [start for start, _ in ordered] == ends[:-1] and ends[-1] == len(prompt.text)


# What is written


def test_the_built_in_templates_are_the_files_of_the_package():
    folder = files("floatscope.tasks") / "templates"
    assert {f"{name}.toml" for name in TEMPLATES} == {file.name for file in folder.iterdir()}
    assert TEMPLATES == ("af-llada", "af-others", "default", "instruct", "question-first")
    assert [template(name).name for name in TEMPLATES] == list(TEMPLATES)
    assert template() == template("default")


def test_default_is_what_the_twins_learnt():
    assert template().prompt(ASKED, [SHOT, ALONE]).text == (
        "Document 1: Jon keeps a {cow}.\nQuestion: Who keeps a cow?\nAnswer: Jon\n\n"
        "Question: Who?\nAnswer: Jon\n\n"
        "Document 1: Jon keeps a {cow}.\nDocument 2: Mira lives in Velmora.\nQuestion: Where does {Mira} live?\nAnswer:"
    )
    assert template().prompt(ASKED) == prompt_of(ASKED)
    assert template().prompt(ALONE).text == "Question: Who?\nAnswer:"


def test_question_first_is_what_the_twins_have_seen_too():
    assert template("question-first").prompt(ASKED, [SHOT]).text == (
        "Question: Who keeps a cow?\nDocument 1: Jon keeps a {cow}.\nAnswer: Jon\n\n"
        "Question: Where does {Mira} live?\nDocument 1: Jon keeps a {cow}.\nDocument 2: Mira lives in Velmora.\nAnswer:"
    )
    assert template("question-first").prompt(ASKED) == prompt_of(ASKED, question_first=True)


def test_instruct_says_what_is_wanted():
    assert template("instruct").prompt(ASKED).text == (
        "Answer the question with a short phrase. If the documents hold the answer, take it from there.\n\n"
        "Document 1: Jon keeps a {cow}.\nDocument 2: Mira lives in Velmora.\nQuestion: Where does {Mira} live?\nAnswer:"
    )


RULES = """\
Here are passages and a question. Use the passages where they help, and answer shortly and directly.

Rules:
- Look at the context first.
- If the answer is in it, take it from there.
- If it is not, answer from what you know.
- Write one to ten words, not more.
- Do not explain anything.
- Do not repeat the passages.

"""


def test_af_llada_has_rules_passages_and_a_short_answer():
    assert template("af-llada").prompt(ASKED).text == RULES + (
        "Context:\nPassage 1:\nJon keeps a {cow}.\n\nPassage 2:\nMira lives in Velmora.\n\n"
        "Question: Where does {Mira} live?\n\nShort Answer:"
    )
    assert template("af-llada").prompt(ALONE, [SHOT]).text == RULES + (
        "Context:\nPassage 1:\nJon keeps a {cow}.\n\nQuestion: Who keeps a cow?\n\nShort Answer: Jon\n\n"
        "Context:\nThere is no relevant context for this question.\n\nQuestion: Who?\n\nShort Answer:"
    )


BEGIN = """\
You are a helper who answers questions in a few words.

Instructions:
1. Read the context before you answer.
2. If it holds the answer, take it from there.
3. If it does not, answer from general knowledge.
4. Write ten words at most.
5. Give the answer alone, without reasons.
6. Never say that no answer was found.

Context:
"""
EXAMPLES = """\
Examples:

Context:
Passage 1:
The Danube rises in the Black Forest and ends in the Black Sea.

Question: Where does the Danube rise?
Answer: in the Black Forest

Context:
Passage 1:
A chessboard has 64 squares; each side begins with 16 pieces.

Question: How many pieces does a side have when a game of chess begins?
Answer: 16

Context:
Passage 1:
Bees dance to tell each other where flowers are.

Question: What is the capital of Japan?
Answer: Tokyo
(The context does not say it; this is general knowledge.)

"""
FORMAT = "Answer the next question in the same format.\n\n"


def test_af_others_has_instructions_passages_and_examples():
    prompt = template("af-others").prompt(ASKED)
    told = "Passage 1:\nJon keeps a {cow}.\n\nPassage 2:\nMira lives in Velmora.\n\n"
    assert prompt.text == f"{BEGIN}{told}{EXAMPLES}{FORMAT}Question: Where does {{Mira}} live?\nAnswer:"
    assert said(prompt, "question") == [ASKED.question]
    assert not [name for name in prompt.spans if name.startswith("shot")]  # its examples are of the template
    none = "There is no relevant context for this question.\n\n"
    shot = "Context:\nPassage 1:\nJon keeps a {cow}.\n\nQuestion: Who keeps a cow?\nAnswer: Jon\n\n"
    assert (
        template("af-others").prompt(ALONE, [SHOT]).text
        == f"{BEGIN}{none}{EXAMPLES}{shot}{FORMAT}Question: Who?\nAnswer:"
    )


# Where everything stands


def test_a_shot_is_one_region_and_nothing_in_it_has_a_name_of_its_own():
    example = Sample("s", ASKED.question, ("Velmora",), (MIRA,))
    prompt = template("instruct").prompt(ASKED, [example, ALONE])
    assert said(prompt, "shot 1") == [f"Document 1: {MIRA.text}\nQuestion: {ASKED.question}\nAnswer: Velmora\n\n"]
    assert said(prompt, "shot 2") == ["Question: Who?\nAnswer: Jon\n\n"]
    assert said(prompt, "document 1") == [JON.text]
    assert said(prompt, "gold") == [MIRA.text]
    assert said(prompt, "evidence") == ["Velmora"]
    assert said(prompt, "question") == [ASKED.question]
    found = tokens_of(prompt, [(at, at + 1) for at in range(len(prompt.text))])
    assert found["shot 1"] == list(range(*prompt.spans["shot 1"][0]))


def test_a_title_is_of_its_document():
    titled = Template(
        "titled", {"prompt": "{passages}{question}", "passage": "{number}. {title} / {text} ({number})\n"}
    )
    prompt = titled.prompt(ASKED)
    assert prompt.text.startswith("1. Jon / Jon keeps a {cow}. (1)\n2. Mira / Mira lives in Velmora. (2)\n")
    assert said(prompt, "document 2") == said(prompt, "gold") == ["Mira", MIRA.text]
    assert said(prompt, "evidence") == ["Velmora"]
    assert said(prompt, "template") == ["1. ", " / ", " (1)\n", "2. ", " / ", " (2)\n"]
    assert tokens_of(prompt, [(0, 1), (3, 6), (35, 39), (42, 46)])["gold"] == [2, 3]


def test_every_question_is_found_and_braces_may_be_written():
    prompt = Template("twice", {"prompt": "{{x}} {question} {{ {question}"}).prompt(ASKED)
    assert prompt.text == "{x} Where does {Mira} live? { Where does {Mira} live?"
    assert said(prompt, "question") == [ASKED.question] * 2
    assert said(prompt, "template") == ["{x} ", " { "]


TEXT = st.text(st.sampled_from("a\n {}") | st.characters(exclude_categories=["Cs"]), max_size=8)
TOLD = st.lists(st.tuples(TEXT, TEXT, st.booleans()), max_size=5)
NAMES = st.sampled_from(["{instruction}", "{shots}", "{passages}", "{question}", "{{", "}}", "a", "\n", " b"])


@st.composite
def pieces(draw):
    """Any prompt with a question, its other placeholders once at most."""
    parts = draw(st.lists(NAMES, max_size=8))
    parts = [p for at, p in enumerate(parts) if p == "{question}" or p[-1] != "}" or p == "}}" or p not in parts[:at]]
    parts.insert(draw(st.integers(0, len(parts))), "{question}")
    text = "".join(parts)
    if draw(st.booleans()):
        text = text.replace("{passages}", "{first_half}|{second_half}")
    plain = draw(TEXT).replace("{", "{{").replace("}", "}}")
    passage = draw(
        st.sampled_from(["{text}", "{title}{text}", "{number}: {text}\n", "{text} by {title}{number}{number}"])
    )
    shot = draw(st.sampled_from(["{question}{answer}", "{passages}Q {question}\nA {answer}\n"]))
    return {"prompt": text, "instruction": plain, "no_passages": plain, "passage": passage, "shot": shot}


@given(pieces(), TOLD, TEXT, st.lists(TOLD, max_size=2))
def test_every_character_is_in_one_part_and_spans_hold_what_they_are_named_for(pieces, told, question, shown):
    made = Template("x", pieces)
    sample = Sample("x", question, ("y",), tuple(Passage(*each) for each in told))
    shots = [Sample("s", question, ("y",), tuple(Passage(*each) for each in told)) for told in shown]
    prompt = made.prompt(sample, shots if "{shots}" in pieces["prompt"] else [])
    assert is_covered(prompt)
    assert said(prompt, "question") == [question] * pieces["prompt"].count("{question}")
    if "{passages}" in pieces["prompt"] or "{first_half}" in pieces["prompt"]:
        for number, passage in enumerate(sample.passages, 1):
            assert passage.text in said(prompt, f"document {number}")
        assert ("gold" in prompt.spans) == any(passage.gold for passage in sample.passages)
    assert all(start < stop for start, stop in prompt.spans.get("template", []))


# Files, and what is refused


def test_a_file_takes_the_place_of_a_built_in_one(tmp_path):
    (tmp_path / "mine.toml").write_bytes(b'\xef\xbb\xbfprompt = """\r\n{passages}\r\nQ: {question}\r\nA:"""\r\n')
    mine = template(tmp_path / "mine.toml")
    assert mine == template(str(tmp_path / "mine.toml"))
    assert mine.name == "mine.toml"
    assert mine.pieces == {**USUAL, "prompt": "{passages}\nQ: {question}\nA:"}
    assert mine.prompt(ALONE).text == "\nQ: Who?\nA:"


def test_a_digest_is_of_what_is_said_whatever_it_is_called(tmp_path):
    (tmp_path / "mine.toml").write_text(
        "# mine\nprompt = '''{instruction}{shots}{passages}Question: {question}\nAnswer:'''"
    )
    assert template(tmp_path / "mine.toml").sha256 == template().sha256
    assert len({template(name).sha256 for name in TEMPLATES}) == len(TEMPLATES)
    assert len(template().sha256) == 64


BAD = {
    "keys": ('promt = "{question}"', "unknown key 'promt' (did you mean 'prompt'?); allowed: prompt, passage, shot, "),
    "no prompt": ('shot = "{question}{answer}"', 'the key "prompt" is missing'),
    "number": ("prompt = 3", '"prompt" must be a text, not int; allowed keys: prompt, passage, '),
    "table": ('[prompt]\ntext = "{question}"', '"prompt" must be a text, not dict'),
    "no question": ('prompt = "Say something"', '"prompt" lacks {question}'),
    "no text": ('prompt = "{question}"\npassage = "{title}"', '"passage" lacks {text}'),
    "no answer": ('prompt = "{question}"\nshot = "{question}"', '"shot" lacks {answer}'),
    "unknown": (
        'prompt = "{qestion}"',
        '"prompt" has an unknown placeholder {qestion}; allowed: {instruction}, {shots}, ',
    ),
    "attribute": ('prompt = "{question.a}"', '"prompt" has an unknown placeholder {question.a}; allowed: '),
    "nameless": ('prompt = "{question}{}"', '"prompt" has an unknown placeholder {}; allowed: '),
    "none": ('prompt = "{question}"\ninstruction = "{question}"', "{question}; allowed: none; a brace that is meant"),
    "elsewhere": ('prompt = "{question}{text}"', '"prompt" has an unknown placeholder {text}'),
    "twice": ('prompt = "{passages}{question}{passages}"', '"prompt" has {passages} 2 times; it may stand there once'),
    "text twice": ('prompt = "{question}"\npassage = "{text}{text}"', '"passage" has {text} 2 times'),
    "half": (
        'prompt = "{first_half}{question}"',
        "{first_half}: write {passages}, or both {first_half} and {second_half}",
    ),
    "too many": ('prompt = "{passages}{question}{first_half}{second_half}"', '"prompt" has {first_half}: write '),
    "open": ('prompt = "{question} {"', "\"prompt\" cannot be read (Single '{'"),
    "closed": ('prompt = "{question} }"', "a brace that is meant is written twice"),
    "changed": ('prompt = "{question!r}"', '"prompt" changes {question} with ! or :'),
    "format": ('prompt = "{question:>9}"', '"prompt" changes {question} with ! or :'),
    "no TOML": ("prompt", "it is no TOML (Expected '='"),
    "no UTF-8": (b"prompt = '{question}\xff'", "it is no UTF-8 text (invalid start byte)"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_refused_in_a_sentence(tmp_path, case):
    content, told = BAD[case]
    file = tmp_path / "bad.toml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as error:
        template(file)
    assert str(error.value).startswith(f"{file}: ")
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_a_name_that_is_no_template_and_no_file_is_refused(tmp_path):
    with pytest.raises(UserError) as error:
        template("instuct")
    assert str(error.value) == (
        "unknown template 'instuct' (did you mean 'instruct'?); allowed: af-llada, af-others, default, instruct,"
        " question-first, or the path of a TOML file"
    )
    with pytest.raises(UserError, match="unknown template 'a\0b'"):
        template("a\0b")
    with pytest.raises(UserError, match=r"cannot read .*: Is a directory"):
        template(tmp_path)


def test_shots_need_a_place_and_an_answer():
    with pytest.raises(UserError, match=r"the template bare has no place for shots: write \{shots\} into its prompt"):
        Template("bare", {"prompt": "{question}"}).prompt(ASKED, [SHOT])
    with pytest.raises(UserError, match="'b' has no answer, so it cannot be an example"):
        template().prompt(ASKED, [Sample("b", "Who?", ())])


# The question in other places


D1, D2 = "Document 1: Jon keeps a {cow}.\n", "Document 2: Mira lives in Velmora.\n"
Q = "Question: Where does {Mira} live?\n"
DEFAULT = {
    "before": f"{Q}{D1}{D2}Answer:",
    "after": f"{D1}{D2}{Q}Answer:",
    "both": f"{Q}{D1}{D2}{Q}Answer:",
    "middle": f"{D1}{Q}{D2}Answer:",
}


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("name", ["default", "question-first"])
def test_the_question_goes_where_it_is_wanted(name, where):
    prompt = template(name).prompt(ASKED, placement=where)
    assert prompt == placed(template(name), where).prompt(ASKED)
    assert prompt.text == DEFAULT[where]
    assert said(prompt, "question") == [ASKED.question] * (2 if where == "both" else 1)
    assert said(prompt, "document 2") == [MIRA.text]
    assert is_covered(prompt)


@pytest.mark.parametrize("where", PLACES)
def test_shots_are_asked_alike(where):
    shots = [Sample("s", "Who?", ("Jon",), (JON, MIRA))]
    shot = DEFAULT[where].replace(ASKED.question, "Who?") + " Jon\n\n"
    assert template().prompt(ASKED, shots, where).text == shot + DEFAULT[where]
    closed = Template("closed", {**template().pieces, "shot": "Q {question} A {answer}\n"})
    assert closed.prompt(ASKED, [SHOT], where).text == "Q Who keeps a cow? A Jon\n" + DEFAULT[where]


def test_a_heading_stays_with_its_passages():
    p1, p2, q = "Passage 1:\nJon keeps a {cow}.\n\n", "Passage 2:\nMira lives in Velmora.\n\n", f"{Q}\n"
    assert {where: template("af-llada").prompt(ASKED, placement=where).text for where in PLACES} == {
        "before": f"{RULES}{q}Context:\n{p1}{p2}Short Answer:",
        "after": f"{RULES}Context:\n{p1}{p2}{q}Short Answer:",
        "both": f"{RULES}{q}Context:\n{p1}{p2}{q}Short Answer:",
        "middle": f"{RULES}Context:\n{p1}{q}{p2}Short Answer:",
    }
    begin = BEGIN.removesuffix("Context:\n")
    assert {where: template("af-others").prompt(ASKED, placement=where).text for where in PLACES} == {
        "before": f"{begin}{Q}Context:\n{p1}{p2}{EXAMPLES}{FORMAT}Answer:",
        "after": f"{BEGIN}{p1}{p2}{EXAMPLES}{FORMAT}{Q}Answer:",
        "both": f"{begin}{Q}Context:\n{p1}{p2}{EXAMPLES}{FORMAT}{Q}Answer:",
        "middle": f"{BEGIN}{p1}{Q}{p2}{EXAMPLES}{FORMAT}Answer:",
    }


def test_a_question_under_the_heading_stays_there_unless_it_is_moved():
    odd = Template(
        "odd", {"prompt": "Read.\nQ: {question}?\n{passages}A:", "passage": "{text}\n", "shot": "{question}{answer}"}
    )
    j, m, q = f"{JON.text}\n", f"{MIRA.text}\n", f"Q: {ASKED.question}?\n"
    assert {where: odd.prompt(ASKED, placement=where).text for where in PLACES} == {
        "before": f"Read.\n{q}{j}{m}A:",
        "after": f"Read.\n{j}{m}{q}A:",
        "both": f"Read.\n{q}{j}{m}{q}A:",
        "middle": f"Read.\n{j}{q}{m}A:",
    }


def test_what_stands_between_question_and_passages_stays_there():
    pieces = {
        "prompt": "{question}\nThink.\n\nRead:\n{passages}A:",
        "passage": "{text}\n",
        "shot": "{question}{answer}",
    }
    j, m, q = f"{JON.text}\n", f"{MIRA.text}\n", f"{ASKED.question}\n"
    assert {where: Template("far", pieces).prompt(ASKED, placement=where).text for where in PLACES} == {
        "before": f"{q}Think.\n\nRead:\n{j}{m}A:",
        "after": f"Think.\n\nRead:\n{j}{m}{q}A:",
        "both": f"{q}Think.\n\nRead:\n{j}{m}{q}A:",
        "middle": f"Think.\n\nRead:\n{j}{q}{m}A:",
    }


def test_the_middle_is_behind_the_half_of_the_passages_that_has_more():
    for count, first in ((0, 0), (1, 1), (2, 1), (3, 2), (4, 2), (5, 3)):
        sample = Sample("a", "Who?", (), tuple(Passage("", f"p{number}") for number in range(count)))
        lines = template().prompt(sample, placement="middle").text.splitlines()
        assert lines.index("Question: Who?") == first
        assert len(lines) == count + 2
    none = template("af-llada").prompt(ALONE, placement="middle").text
    assert none.endswith("Context:\nThere is no relevant context for this question.\n\nQuestion: Who?\n\nShort Answer:")


def test_a_template_that_was_moved_says_so():
    assert placed(template(), "after") is template()
    assert placed(template(), "before").name == "default, question before"
    assert placed(template(), "before").sha256 == template("question-first").sha256
    assert len({placed(template(), where).sha256 for where in PLACES}) == len(PLACES)


@pytest.mark.parametrize(
    "pieces",
    [
        {"prompt": "Question: {question}\nAnswer:"},
        {"prompt": "{passages}Question: {question}"},
        {"prompt": "Take {passages} and say {question}\n"},
        {"prompt": "{question}\n{passages}{question}\n"},
        {"prompt": "{first_half}{question}\n{second_half}"},
        {"prompt": "{passages}{question}\n", "passage": "{text}"},
        {"prompt": "{passages}{question}\n", "shot": "{passages}{question} {answer}"},
        {"prompt": "{passages}{question}\n", "shot": "{first_half}{question}\n{second_half}{answer}"},
        {"prompt": "{passages}{{question}}\n{question}"},
    ],
)
def test_what_is_not_made_of_lines_cannot_be_moved(pieces):
    for where in PLACES:
        with pytest.raises(UserError) as error:
            placed(Template("mine", pieces), where)
        assert str(error.value) == (
            "the template mine cannot have its question elsewhere: that needs {passages} and one {question}, each where"
            " a line begins or after a placeholder, and a line end after it and each passage"
        )


def test_an_unknown_place_is_refused():
    with pytest.raises(
        UserError, match=r"unknown placement 'midle' \(did you mean 'middle'\?\); allowed: before, after"
    ):
        template().prompt(ASKED, placement="midle")
