"""Which characters a token covers: the ids equal those of `encode`, and each character has its token."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tiny_checkpoints import TINY_ARCHITECTURES, write_tiny
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from floatscope.errors import UserError
from floatscope.models.tokenizer import ModelTokenizer
from floatscope.models.tokenizer_files import open_tokenizer

WORDS = "héllo wörld, 𝄞 floats!\n\tyes  no"
ANY = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    home = tmp_path_factory.mktemp("tokenizers")
    return {
        name: open_tokenizer(write_tiny(home / name, name), has_separator=name == "bert") for name in TINY_ARCHITECTURES
    }


def with_template(tokenizer, template):
    tokenizer.chat_template = template
    return ModelTokenizer(tokenizer)


def byte_level(trim: bool) -> PreTrainedTokenizerFast:
    """A tokenizer with the space before each word, as those of GPT-2, Qwen and Llama 3."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*letters, "Ġa", "ĠĠ", ".Ċ", "ab"])}
    merges = [("Ġ", "a"), ("Ġ", "Ġ"), (".", "Ċ"), ("a", "b")]
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.post_processor = processors.ByteLevel(trim_offsets=trim)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def expected_offset(text: str, chars: list[int]) -> tuple[int, int]:
    """Leave out the space around other characters; a token of spaces alone covers them."""
    solid = [i for i in chars if not text[i].isspace()] or chars
    return solid[0], solid[-1] + 1


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("architecture", TINY_ARCHITECTURES)
@given(text=ANY)
@example(WORDS)
@example("user")
@example("  assistant\n\n")
def test_ids_equal_those_of_encode(tokenizers, architecture, chat, text):
    if architecture != "bert" or not chat:
        assert tokenizers[architecture].encode_with_offsets(text, chat).ids == tokenizers[architecture].encode(
            text, chat
        )


@pytest.mark.parametrize("architecture", TINY_ARCHITECTURES)
@given(text=ANY.filter(lambda text: "<" not in text and "[" not in text))  # no special token by its name
@example(WORDS)
def test_a_token_of_one_byte_covers_its_character(tokenizers, architecture, text):
    """Independent of the tokenizer's offsets: here a token is a byte, and a byte belongs to a character."""
    assume(unicodedata.is_normalized("NFC", text) or architecture != "dream")
    by_byte = [(i, i + 1) for i, character in enumerate(text) for _ in character.encode()]
    assert tokenizers[architecture].encode_with_offsets(text).offsets == [None] * (architecture == "bert") + by_byte


@pytest.mark.parametrize("trim", [True, False])
@given(text=st.text("ab .\n𝄞", max_size=12).map(lambda text: text.lstrip(" ")))  # trimmed, a first space is lost
@example("a  b.\n a   ")
def test_space_around_a_token_is_not_covered(trim, text):
    encoding = ModelTokenizer(byte_level(trim)).encode_with_offsets(text)
    by_byte = [i for i, character in enumerate(text) for _ in character.encode()]
    start, offsets = 0, []
    for token in encoding.ids:
        size = {256: 2, 257: 2, 258: 2, 259: 2}.get(token, 1)
        offsets.append(expected_offset(text, by_byte[start : start + size]))
        start += size
    assert encoding.offsets == offsets


@pytest.mark.parametrize("architecture", ["llada", "dream", "llama"])
@given(text=ANY.filter(str.strip))
@example("user")
@example("assistant")
@example("\n\n")
@example("  hi ")
@example("<|im_end|>")
def test_a_prompt_is_found_in_its_conversation(tokenizers, architecture, text):
    assume(unicodedata.is_normalized("NFC", text) or architecture != "dream")
    encoding = tokenizers[architecture].encode_with_offsets(text, chat=True)
    assert encoding.offsets is not None
    inner = text.strip() if architecture == "llada" else text  # LLaDA's template trims
    lead = text.index(inner)
    inside = [
        (i, c)
        for i, c in zip(encoding.ids, encoding.offsets, strict=True)
        if c is not None and c[0] >= 0 and c[1] <= len(text)
    ]
    if "<|" not in text:
        assert [c for _, c in inside] == [(lead + i, lead + i + 1) for i, ch in enumerate(inner) for _ in ch.encode()]
    before, after = ("".join(tokenizers[architecture].pieces(ids)) for ids in ids_around(encoding, len(text)))
    assert before.endswith("user\n\n" if architecture == "llada" else "user\n")
    assert after.endswith("assistant\n\n" if architecture == "llada" else "assistant\n")


def ids_around(encoding, length):
    pairs = list(zip(encoding.ids, encoding.offsets, strict=True))
    before = [i for i, c in pairs if c is not None and c[1] <= 0]
    return before, [i for i, c in pairs if c is not None and c[0] >= length]


def test_special_tokens_cover_nothing(tokenizers):
    tokenizer = tokenizers["llada"]
    for chat in (False, True):
        encoding = tokenizer.encode_with_offsets("a<|mdm_mask|>b", chat)
        for token, offset in zip(encoding.ids, encoding.offsets, strict=True):
            assert (offset is None) == (token in tokenizer.special_ids)
    assert tokenizers["bert"].encode_with_offsets("a").offsets == [None, (0, 1)]


def test_an_unknown_token_covers_its_word():
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = ModelTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]"))
    assert tokenizer.encode_with_offsets("a œuf a").ids == [1, 0, 1]
    assert tokenizer.encode_with_offsets("a œuf a").offsets == [(0, 1), (2, 5), (6, 7)]


def test_offsets_refer_to_the_text_before_normalisation():
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "é": 1, "b": 2}, unk_token="[UNK]"))
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(" "), "removed")
    tokenizer = ModelTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]"))
    encoding = tokenizer.encode_with_offsets("E\u0301 B")
    assert encoding.ids == [1, 2]
    assert encoding.offsets[0][0] == 0
    assert encoding.offsets[1] == (3, 4)


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
def test_a_template_that_changes_the_prompt_has_no_offsets(template):
    tokenizer = with_template(byte_level(trim=True), template)
    encoding = tokenizer.encode_with_offsets("a cat", chat=True)
    assert encoding.offsets is None
    assert encoding.ids == tokenizer.encode("a cat", chat=True)


def test_a_slow_tokenizer_has_no_offsets(tokenizers):
    class Slow:
        is_fast = False

        def __getattr__(self, name):
            return getattr(tokenizers["llada"].hf, name)

        def __call__(self, text, return_offsets_mapping=False, **options):
            assert not return_offsets_mapping
            return tokenizers["llada"].hf(text, **options)

    for chat in (False, True):
        encoding = ModelTokenizer(Slow()).encode_with_offsets("hi", chat)
        assert (encoding.ids, encoding.offsets) == (tokenizers["llada"].encode("hi", chat), None)


def test_chat_needs_a_template(tokenizers):
    with pytest.raises(UserError, match="has no chat template; encode with chat=False"):
        tokenizers["bert"].encode_with_offsets("hi", chat=True)
