"""Templates: the prompts they write, their regions, their errors, and moving the question."""

from __future__ import annotations

from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floatscope.errors import UserError
from floatscope.tasks.regions import find_region_tokens
from floatscope.tasks.sample import Passage, Sample
from floatscope.tasks.template import PLACEMENTS, TEMPLATES, Pieces, Template, load_template, place_question

MIRA = Passage("Mira", "Mira lives in Velmora.", True, ((14, 21),))
JON = Passage("Jon", "Jon keeps a {cow}.")
SAMPLE = Sample("a", "Where does {Mira} live?", ("Velmora", "there"), (JON, MIRA))
SHOT = Sample("s", "Who keeps a cow?", ("Jon", "he"), (JON,))
ALONE = Sample("b", "Who?", ("Jon",))


def region_texts(prompt, region):
    return [prompt.text[a:b] for a, b in prompt.spans[region]]


def is_covered(prompt):
    spans = [s for name, tokens in prompt.spans.items() if name not in ("gold", "evidence") for s in tokens]
    ordered = sorted(spans)
    ends = [0, *(stop for _, stop in ordered)]
    return [start for start, _ in ordered] == ends[:-1] and ends[-1] == len(prompt.text)


# Prompts


def test_the_built_in_templates_are_the_files_of_the_package():
    folder = files("floatscope.tasks") / "templates"
    assert {f"{name}.toml" for name in TEMPLATES} == {file.name for file in folder.iterdir()}
    assert TEMPLATES == ("af-llada", "af-others", "default", "instruct", "question-first")
    assert [load_template(name).name for name in TEMPLATES] == list(TEMPLATES)
    assert load_template() == load_template("default")


def test_default_is_the_training_prompt_of_the_twins():
    assert load_template().prompt(SAMPLE, [SHOT, ALONE]).text == (
        "Document 1: Jon keeps a {cow}.\nQuestion: Who keeps a cow?\nAnswer: Jon\n\n"
        "Question: Who?\nAnswer: Jon\n\n"
        "Document 1: Jon keeps a {cow}.\nDocument 2: Mira lives in Velmora.\nQuestion: Where does {Mira} live?\nAnswer:"
    )
    assert load_template().prompt(ALONE).text == "Question: Who?\nAnswer:"


def test_question_first_puts_the_question_before_the_passages():
    assert load_template("question-first").prompt(SAMPLE, [SHOT]).text == (
        "Question: Who keeps a cow?\nDocument 1: Jon keeps a {cow}.\nAnswer: Jon\n\n"
        "Question: Where does {Mira} live?\nDocument 1: Jon keeps a {cow}.\nDocument 2: Mira lives in Velmora.\nAnswer:"
    )


def test_instruct_begins_with_an_instruction():
    assert load_template("instruct").prompt(SAMPLE).text == (
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
    assert load_template("af-llada").prompt(SAMPLE).text == RULES + (
        "Context:\nPassage 1:\nJon keeps a {cow}.\n\nPassage 2:\nMira lives in Velmora.\n\n"
        "Question: Where does {Mira} live?\n\nShort Answer:"
    )
    assert load_template("af-llada").prompt(ALONE, [SHOT]).text == RULES + (
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
    prompt = load_template("af-others").prompt(SAMPLE)
    passages = "Passage 1:\nJon keeps a {cow}.\n\nPassage 2:\nMira lives in Velmora.\n\n"
    assert prompt.text == f"{BEGIN}{passages}{EXAMPLES}{FORMAT}Question: Where does {{Mira}} live?\nAnswer:"
    assert region_texts(prompt, "question") == [SAMPLE.question]
    assert not [name for name in prompt.spans if name.startswith("shot")]  # its examples belong to the template
    none = "There is no relevant context for this question.\n\n"
    shot = "Context:\nPassage 1:\nJon keeps a {cow}.\n\nQuestion: Who keeps a cow?\nAnswer: Jon\n\n"
    assert (
        load_template("af-others").prompt(ALONE, [SHOT]).text
        == f"{BEGIN}{none}{EXAMPLES}{shot}{FORMAT}Question: Who?\nAnswer:"
    )


# Regions


def test_a_shot_is_one_region():
    example = Sample("s", SAMPLE.question, ("Velmora",), (MIRA,))
    prompt = load_template("instruct").prompt(SAMPLE, [example, ALONE])
    assert region_texts(prompt, "shot 1") == [
        f"Document 1: {MIRA.text}\nQuestion: {SAMPLE.question}\nAnswer: Velmora\n\n"
    ]
    assert region_texts(prompt, "shot 2") == ["Question: Who?\nAnswer: Jon\n\n"]
    assert region_texts(prompt, "document 1") == [JON.text]
    assert region_texts(prompt, "gold") == [MIRA.text]
    assert region_texts(prompt, "evidence") == ["Velmora"]
    assert region_texts(prompt, "question") == [SAMPLE.question]
    tokens = find_region_tokens(prompt, [(at, at + 1) for at in range(len(prompt.text))])
    assert tokens["shot 1"] == list(range(*prompt.spans["shot 1"][0]))


def test_a_title_belongs_to_its_document():
    titled = Template(
        "titled", {"prompt": "{passages}{question}", "passage": "{number}. {title} / {text} ({number})\n"}
    )
    prompt = titled.prompt(SAMPLE)
    assert prompt.text.startswith("1. Jon / Jon keeps a {cow}. (1)\n2. Mira / Mira lives in Velmora. (2)\n")
    assert region_texts(prompt, "document 2") == region_texts(prompt, "gold") == ["Mira", MIRA.text]
    assert region_texts(prompt, "evidence") == ["Velmora"]
    assert region_texts(prompt, "template") == ["1. ", " / ", " (1)\n", "2. ", " / ", " (2)\n"]
    assert find_region_tokens(prompt, [(0, 1), (3, 6), (35, 39), (42, 46)])["gold"] == [2, 3]


def test_repeated_questions_and_literal_braces_are_allowed():
    prompt = Template("twice", {"prompt": "{{x}} {question} {{ {question}"}).prompt(SAMPLE)
    assert prompt.text == "{x} Where does {Mira} live? { Where does {Mira} live?"
    assert region_texts(prompt, "question") == [SAMPLE.question] * 2
    assert region_texts(prompt, "template") == ["{x} ", " { "]


TEXT = st.text(st.sampled_from("a\n {}") | st.characters(exclude_categories=["Cs"]), max_size=8)
ENTRIES = st.lists(st.tuples(TEXT, TEXT, st.booleans()), max_size=5)
NAMES = st.sampled_from(["{instruction}", "{shots}", "{passages}", "{question}", "{{", "}}", "a", "\n", " b"])


@st.composite
def pieces(draw):
    """A prompt with questions, and every other placeholder at most once."""
    parts = draw(st.lists(NAMES, max_size=8))
    parts = [p for at, p in enumerate(parts) if p == "{question}" or p[-1] != "}" or p == "}}" or p not in parts[:at]]
    parts.insert(draw(st.integers(0, len(parts))), "{question}")
    text = "".join(parts)
    if draw(st.booleans()):
        text = text.replace("{passages}", "{first_half}|{second_half}")
    literal = draw(TEXT).replace("{", "{{").replace("}", "}}")
    passage = draw(
        st.sampled_from(["{text}", "{title}{text}", "{number}: {text}\n", "{text} by {title}{number}{number}"])
    )
    shot = draw(st.sampled_from(["{question}{answer}", "{passages}Q {question}\nA {answer}\n"]))
    return {"prompt": text, "instruction": literal, "no_passages": literal, "passage": passage, "shot": shot}


@given(pieces(), ENTRIES, TEXT, st.lists(ENTRIES, max_size=2))
def test_every_character_is_in_one_region(pieces, passages, question, shot_entries):
    template = Template("x", pieces)
    sample = Sample("x", question, ("y",), tuple(Passage(*entry) for entry in passages))
    shots = [Sample("s", question, ("y",), tuple(Passage(*entry) for entry in passages)) for passages in shot_entries]
    prompt = template.prompt(sample, shots if "{shots}" in pieces["prompt"] else [])
    assert is_covered(prompt)
    assert region_texts(prompt, "question") == [question] * pieces["prompt"].count("{question}")
    if "{passages}" in pieces["prompt"] or "{first_half}" in pieces["prompt"]:
        for number, passage in enumerate(sample.passages, 1):
            assert passage.text in region_texts(prompt, f"document {number}")
        assert ("gold" in prompt.spans) == any(passage.gold for passage in sample.passages)
    assert all(start < stop for start, stop in prompt.spans.get("template", []))


# Files and errors


def test_a_file_is_a_template_too(tmp_path):
    (tmp_path / "mine.toml").write_bytes(b'\xef\xbb\xbfprompt = """\r\n{passages}\r\nQ: {question}\r\nA:"""\r\n')
    mine = load_template(tmp_path / "mine.toml")
    assert mine == load_template(str(tmp_path / "mine.toml"))
    assert mine.name == "mine.toml"
    assert Pieces(**mine.pieces) == Pieces(prompt="{passages}\nQ: {question}\nA:")
    assert mine.prompt(ALONE).text == "\nQ: Who?\nA:"


def test_the_digest_depends_on_the_pieces_and_not_the_name(tmp_path):
    (tmp_path / "mine.toml").write_text(
        "# mine\nprompt = '''{instruction}{shots}{passages}Question: {question}\nAnswer:'''"
    )
    assert load_template(tmp_path / "mine.toml").sha256 == load_template().sha256
    assert len({load_template(name).sha256 for name in TEMPLATES}) == len(TEMPLATES)
    assert len(load_template().sha256) == 64


BAD = {
    "keys": ('promt = "{question}"', "unknown field 'promt' (did you mean 'prompt'?); allowed: prompt, passage, "),
    "no prompt": ('shot = "{question}{answer}"', "missing required field 'prompt'; a template is texts, and its"),
    "number": ("prompt = 3", "Expected 'str', got 'int' - in 'prompt'; a template is texts"),
    "table": ('[prompt]\ntext = "{question}"', "Expected 'str', got 'object' - in 'prompt'"),
    "no question": ('prompt = "Say something"', '"prompt" lacks {question}'),
    "no text": ('prompt = "{question}"\npassage = "{title}"', '"passage" lacks {text}'),
    "no answer": ('prompt = "{question}"\nshot = "{question}"', '"shot" lacks {answer}'),
    "unknown": (
        'prompt = "{qestion}"',
        '"prompt" has an unknown placeholder {qestion}; allowed: {instruction}, {shots}, ',
    ),
    "attribute": ('prompt = "{question.a}"', '"prompt" has an unknown placeholder {question.a}; allowed: '),
    "nameless": ('prompt = "{question}{}"', '"prompt" has an unknown placeholder {}; allowed: '),
    "none": (
        'prompt = "{question}"\ninstruction = "{question}"',
        "{question}; allowed: none; write a literal brace twice",
    ),
    "elsewhere": ('prompt = "{question}{text}"', '"prompt" has an unknown placeholder {text}'),
    "twice": ('prompt = "{passages}{question}{passages}"', '"prompt" has {passages} 2 times; it may occur once'),
    "text twice": ('prompt = "{question}"\npassage = "{text}{text}"', '"passage" has {text} 2 times'),
    "half": (
        'prompt = "{first_half}{question}"',
        "{first_half}: give {passages}, or both {first_half} and {second_half}",
    ),
    "too many": ('prompt = "{passages}{question}{first_half}{second_half}"', '"prompt" has {first_half}: give '),
    "open": ('prompt = "{question} {"', "\"prompt\" cannot be parsed (Single '{'"),
    "closed": ('prompt = "{question} }"', "write a literal brace twice"),
    "changed": ('prompt = "{question!r}"', '"prompt" formats {question} with ! or :'),
    "format": ('prompt = "{question:>9}"', '"prompt" formats {question} with ! or :'),
    "no TOML": ("prompt", "the file is not valid TOML (Expected '='"),
    "no UTF-8": (b"prompt = '{question}\xff'", "the file is not UTF-8 text (invalid start byte)"),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_of_a_file_are_one_sentence(tmp_path, case):
    content, message = BAD[case]
    file = tmp_path / "bad.toml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as error:
        load_template(file)
    assert str(error.value).startswith(f"{file}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unknown_template_is_an_error(tmp_path):
    with pytest.raises(UserError) as error:
        load_template("instuct")
    assert str(error.value) == (
        "unknown template 'instuct' (did you mean 'instruct'?); allowed: af-llada, af-others, default, instruct,"
        " question-first, or the path of a TOML file"
    )
    with pytest.raises(UserError, match="unknown template 'a\0b'"):
        load_template("a\0b")
    with pytest.raises(UserError, match=r"cannot read .*: Is a directory"):
        load_template(tmp_path)


def test_shots_need_a_placeholder_and_an_answer():
    with pytest.raises(UserError, match=r"the template bare has no place for shots: add \{shots\} to its prompt"):
        Template("bare", {"prompt": "{question}"}).prompt(SAMPLE, [SHOT])
    with pytest.raises(UserError, match="'b' has no answer, so it cannot be a shot"):
        load_template().prompt(SAMPLE, [Sample("b", "Who?", ())])


# Moving the question


D1, D2 = "Document 1: Jon keeps a {cow}.\n", "Document 2: Mira lives in Velmora.\n"
Q = "Question: Where does {Mira} live?\n"
DEFAULT = {
    "before": f"{Q}{D1}{D2}Answer:",
    "after": f"{D1}{D2}{Q}Answer:",
    "both": f"{Q}{D1}{D2}{Q}Answer:",
    "middle": f"{D1}{Q}{D2}Answer:",
}


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", ["default", "question-first"])
def test_the_question_is_moved(name, placement):
    prompt = load_template(name).prompt(SAMPLE, placement=placement)
    assert prompt == place_question(load_template(name), placement).prompt(SAMPLE)
    assert prompt.text == DEFAULT[placement]
    assert region_texts(prompt, "question") == [SAMPLE.question] * (2 if placement == "both" else 1)
    assert region_texts(prompt, "document 2") == [MIRA.text]
    assert is_covered(prompt)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_question_of_shots_is_moved_too(placement):
    shots = [Sample("s", "Who?", ("Jon",), (JON, MIRA))]
    shot = DEFAULT[placement].replace(SAMPLE.question, "Who?") + " Jon\n\n"
    assert load_template().prompt(SAMPLE, shots, placement).text == shot + DEFAULT[placement]
    closed = Template("closed", {**load_template().pieces, "shot": "Q {question} A {answer}\n"})
    assert closed.prompt(SAMPLE, [SHOT], placement).text == "Q Who keeps a cow? A Jon\n" + DEFAULT[placement]


def test_a_heading_stays_with_its_passages():
    p1, p2, q = "Passage 1:\nJon keeps a {cow}.\n\n", "Passage 2:\nMira lives in Velmora.\n\n", f"{Q}\n"
    assert {
        placement: load_template("af-llada").prompt(SAMPLE, placement=placement).text for placement in PLACEMENTS
    } == {
        "before": f"{RULES}{q}Context:\n{p1}{p2}Short Answer:",
        "after": f"{RULES}Context:\n{p1}{p2}{q}Short Answer:",
        "both": f"{RULES}{q}Context:\n{p1}{p2}{q}Short Answer:",
        "middle": f"{RULES}Context:\n{p1}{q}{p2}Short Answer:",
    }
    begin = BEGIN.removesuffix("Context:\n")
    assert {
        placement: load_template("af-others").prompt(SAMPLE, placement=placement).text for placement in PLACEMENTS
    } == {
        "before": f"{begin}{Q}Context:\n{p1}{p2}{EXAMPLES}{FORMAT}Answer:",
        "after": f"{BEGIN}{p1}{p2}{EXAMPLES}{FORMAT}{Q}Answer:",
        "both": f"{begin}{Q}Context:\n{p1}{p2}{EXAMPLES}{FORMAT}{Q}Answer:",
        "middle": f"{BEGIN}{p1}{Q}{p2}{EXAMPLES}{FORMAT}Answer:",
    }


def test_a_question_above_the_passages_can_move():
    odd = Template(
        "odd", {"prompt": "Read.\nQ: {question}?\n{passages}A:", "passage": "{text}\n", "shot": "{question}{answer}"}
    )
    j, m, q = f"{JON.text}\n", f"{MIRA.text}\n", f"Q: {SAMPLE.question}?\n"
    assert {placement: odd.prompt(SAMPLE, placement=placement).text for placement in PLACEMENTS} == {
        "before": f"Read.\n{q}{j}{m}A:",
        "after": f"Read.\n{j}{m}{q}A:",
        "both": f"Read.\n{q}{j}{m}{q}A:",
        "middle": f"Read.\n{j}{q}{m}A:",
    }


def test_text_between_question_and_passages_stays():
    pieces = {
        "prompt": "{question}\nThink.\n\nRead:\n{passages}A:",
        "passage": "{text}\n",
        "shot": "{question}{answer}",
    }
    j, m, q = f"{JON.text}\n", f"{MIRA.text}\n", f"{SAMPLE.question}\n"
    assert {
        placement: Template("far", pieces).prompt(SAMPLE, placement=placement).text for placement in PLACEMENTS
    } == {
        "before": f"{q}Think.\n\nRead:\n{j}{m}A:",
        "after": f"Think.\n\nRead:\n{j}{m}{q}A:",
        "both": f"{q}Think.\n\nRead:\n{j}{m}{q}A:",
        "middle": f"Think.\n\nRead:\n{j}{q}{m}A:",
    }


def test_the_middle_is_after_the_larger_half():
    for count, first in ((0, 0), (1, 1), (2, 1), (3, 2), (4, 2), (5, 3)):
        sample = Sample("a", "Who?", (), tuple(Passage("", f"p{number}") for number in range(count)))
        lines = load_template().prompt(sample, placement="middle").text.splitlines()
        assert lines.index("Question: Who?") == first
        assert len(lines) == count + 2
    none = load_template("af-llada").prompt(ALONE, placement="middle").text
    assert none.endswith("Context:\nThere is no relevant context for this question.\n\nQuestion: Who?\n\nShort Answer:")


def test_the_name_of_a_moved_template_says_so():
    assert place_question(load_template(), "after") is load_template()
    assert place_question(load_template(), "before").name == "default, question before"
    assert place_question(load_template(), "before").sha256 == load_template("question-first").sha256
    assert len({place_question(load_template(), placement).sha256 for placement in PLACEMENTS}) == len(PLACEMENTS)


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
def test_a_question_that_shares_its_line_cannot_be_moved(pieces):
    for placement in PLACEMENTS:
        with pytest.raises(UserError) as error:
            place_question(Template("mine", pieces), placement)
        assert str(error.value) == (
            "the question of the template mine cannot be moved: that needs {passages} and one {question}, each at the"
            " start of a line or after a placeholder, and a line end after it and each passage"
        )


def test_an_unknown_placement_is_an_error():
    with pytest.raises(
        UserError, match=r"unknown placement 'midle' \(did you mean 'middle'\?\); allowed: before, after"
    ):
        load_template().prompt(SAMPLE, placement="midle")
