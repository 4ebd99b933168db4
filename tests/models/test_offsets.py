"""Which characters a token stands for: the ids are those of `encode`, and each character is where it should be."""

from __future__ import annotations

import unicodedata

import pytest
from folders import LAYOUTS, tiny
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from floatscope.errors import UserError
from floatscope.models.text import ModelTokenizer, open_text

WORDS = "héllo wörld, 𝄞 floats!\n\tyes  no"
ANY = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    home = tmp_path_factory.mktemp("texts")
    return {name: open_text(tiny(home / name, name), separator=name == "bert") for name in LAYOUTS}


def templated(tokenizer, template):
    tokenizer.chat_template = template
    return ModelTokenizer(tokenizer)


def byte_level(trim: bool) -> PreTrainedTokenizerFast:
    """Words with their space before them, as GPT-2's, Qwen's and Llama 3's tokenizers have them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*letters, "Ġa", "ĠĠ", ".Ċ", "ab"])}
    merges = [("Ġ", "a"), ("Ġ", "Ġ"), (".", "Ċ"), ("a", "b")]
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.post_processor = processors.ByteLevel(trim_offsets=trim)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def expected(text: str, chars: list[int]) -> tuple[int, int]:
    """Without the space around the rest; a token of spaces alone stands for them."""
    solid = [i for i in chars if not text[i].isspace()] or chars
    return solid[0], solid[-1] + 1


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@given(text=ANY)
@example(WORDS)
@example("user")
@example("  assistant\n\n")
def test_ids_are_those_of_encode(texts, layout, chat, text):
    if layout != "bert" or not chat:
        assert texts[layout].locate(text, chat).ids == texts[layout].encode(text, chat)


@pytest.mark.parametrize("layout", LAYOUTS)
@given(text=ANY.filter(lambda text: "<" not in text and "[" not in text))  # no special token by its name
@example(WORDS)
def test_a_token_of_a_byte_stands_for_its_character(texts, layout, text):
    """Independent of the tokenizer's offsets: here a token is a byte, and a byte belongs to a character."""
    assume(unicodedata.is_normalized("NFC", text) or layout != "dream")
    by_byte = [(i, i + 1) for i, character in enumerate(text) for _ in character.encode()]
    assert texts[layout].locate(text).covers == [None] * (layout == "bert") + by_byte


@pytest.mark.parametrize("trim", [True, False])
@given(text=st.text("ab .\n𝄞", max_size=12).map(lambda text: text.lstrip(" ")))  # trimmed, a first space is lost
@example("a  b.\n a   ")
def test_space_around_a_token_does_not_count(trim, text):
    located = ModelTokenizer(byte_level(trim)).locate(text)
    by_byte = [i for i, character in enumerate(text) for _ in character.encode()]
    at, covers = 0, []
    for token in located.ids:
        size = {256: 2, 257: 2, 258: 2, 259: 2}.get(token, 1)
        covers.append(expected(text, by_byte[at : at + size]))
        at += size
    assert located.covers == covers


@pytest.mark.parametrize("layout", ["llada", "dream", "llama"])
@given(text=ANY.filter(str.strip))
@example("user")
@example("assistant")
@example("\n\n")
@example("  hi ")
@example("<|im_end|>")
def test_a_prompt_is_found_in_its_conversation(texts, layout, text):
    assume(unicodedata.is_normalized("NFC", text) or layout != "dream")
    located = texts[layout].locate(text, chat=True)
    assert located.covers is not None
    kept = text.strip() if layout == "llada" else text  # LLaDA's template trims
    lead = text.index(kept)
    inside = [
        (i, c)
        for i, c in zip(located.ids, located.covers, strict=True)
        if c is not None and c[0] >= 0 and c[1] <= len(text)
    ]
    if "<|" not in text:
        assert [c for _, c in inside] == [(lead + i, lead + i + 1) for i, ch in enumerate(kept) for _ in ch.encode()]
    before, after = ("".join(texts[layout].pieces(ids)) for ids in around(located, len(text)))
    assert before.endswith("user\n\n" if layout == "llada" else "user\n")
    assert after.endswith("assistant\n\n" if layout == "llada" else "assistant\n")


def around(located, length):
    told = list(zip(located.ids, located.covers, strict=True))
    before = [i for i, c in told if c is not None and c[1] <= 0]
    return before, [i for i, c in told if c is not None and c[0] >= length]


def test_special_tokens_stand_for_nothing(texts):
    text = texts["llada"]
    for chat in (False, True):
        located = text.locate("a<|mdm_mask|>b", chat)
        for token, cover in zip(located.ids, located.covers, strict=True):
            assert (cover is None) == (token in text.special_ids)
    assert texts["bert"].locate("a").covers == [None, (0, 1)]


def test_an_unknown_word_stands_for_itself():
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    text = ModelTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]"))
    assert text.locate("a œuf a").ids == [1, 0, 1]
    assert text.locate("a œuf a").covers == [(0, 1), (2, 5), (6, 7)]


def test_what_is_normalised_is_counted_in_what_was_given():
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "é": 1, "b": 2}, unk_token="[UNK]"))
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(" "), "removed")
    text = ModelTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]"))
    located = text.locate("E\u0301 B")
    assert located.ids == [1, 2]
    assert located.covers[0][0] == 0
    assert located.covers[1] == (3, 4)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0]['content'] | upper }}",
        "{{ messages[0]['content'] }} {{ messages[0]['content'] }}",
        "nothing of it",
        "{{ messages[0]['content'] | replace('a', 'b') }}",
        "{{ 'short: ' if messages[0]['content'] | length < 9 else '' }}{{ messages[0]['content'] }}",
    ],
)
def test_a_template_that_changes_the_prompt_leaves_nothing_known(template):
    text = templated(byte_level(trim=True), template)
    located = text.locate("a cat", chat=True)
    assert located.covers is None
    assert located.ids == text.encode("a cat", chat=True)


def test_a_tokenizer_without_offsets_leaves_nothing_known(texts):
    class Slow:
        is_fast = False

        def __getattr__(self, name):
            return getattr(texts["llada"].tokenizer, name)

        def __call__(self, text, return_offsets_mapping=False, **how):
            assert not return_offsets_mapping
            return texts["llada"].tokenizer(text, **how)

    for chat in (False, True):
        located = ModelTokenizer(Slow()).locate("hi", chat)
        assert (located.ids, located.covers) == (texts["llada"].encode("hi", chat), None)


def test_without_a_template_there_is_no_conversation(texts):
    with pytest.raises(UserError, match="has no chat template; encode with chat=False"):
        texts["bert"].locate("hi", chat=True)
