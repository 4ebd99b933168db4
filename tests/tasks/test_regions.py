"""The tokens of a region, found by trained tokenizers of the three kinds, and again by walking along the text."""

from __future__ import annotations

import unicodedata
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from floatscope.models.text import ModelTokenizer
from floatscope.tasks.prompt import prompt_of, tokens_of
from floatscope.tasks.sample import Passage, Sample

ŁÓDŹ = "Zażółć gęślą jaźń w Łodzi 🎉🎉, naïve café"
SHIRO = "松本城は長野県にある。 Die Burg heißt Крепость 𝄞"
TOLD = (
    Passage("", ŁÓDŹ, True, ((ŁÓDŹ.index("Łodzi"), ŁÓDŹ.index("Łodzi") + 5),)),
    Passage("", SHIRO, True, ((4, 7), (SHIRO.index("Крепость"), SHIRO.index("Крепость") + 8))),
    Passage("", "Nobody knows."),
)
ASKED = Sample("a", "Où est la 城 de “Łódź”, жители?", ("Łodzi",), TOLD)
LETTERS = sorted(set(prompt_of(ASKED).text + "0123456789") - {"\n"})
ANY = st.text(st.sampled_from([*LETTERS, " ", "\n"]), min_size=1, max_size=20)


def byte_level(trim=True):
    """As GPT-2's, Llama 3's, LLaDA's and Qwen's."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.post_processor, made.decoder = processors.ByteLevel(trim_offsets=trim), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trained(made, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))


def llama():
    """SentencePiece BPE with a token for every byte, as Llama's and Mistral's."""
    made = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    found = trained(made, trainer, replace(ASKED, question="Who?", passages=TOLD[::2]))
    assert "松" not in found.get_vocab()  # it is spelled in bytes
    return found


def unigram():
    """SentencePiece with a unigram model, as T5's."""
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    alphabet = [*LETTERS, "\n", "▁"]
    return trained(
        made,
        trainers.UnigramTrainer(
            vocab_size=300, initial_alphabet=alphabet, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
        ),
    )


def wordpiece():
    """As BERT's, without case and accents."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    alphabet = sorted({c for letter in LETTERS for c in bare(letter)})
    trainer = trainers.WordPieceTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=["[UNK]"], show_progress=False
    )
    found = trained(made, trainer)
    lacking = [f"##{letter}" for letter in alphabet if f"##{letter}" not in found.get_vocab()]
    told = found.get_vocab()
    grown = {**told, **{token: len(told) + i for i, token in enumerate(lacking)}}
    found.backend_tokenizer.model = models.WordPiece(grown, unk_token="[UNK]")
    return found


def trained(tokenizer, trainer, read=ASKED):
    tokenizer.train_from_iterator(prompt_of(read).text.splitlines(keepends=True) * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def bare(letter):
    """Without case and accents."""
    return "".join(c for c in unicodedata.normalize("NFD", letter.lower()) if unicodedata.category(c) != "Mn")


def by_bytes(text, tokens):
    """A letter of a byte-level token is a byte."""
    owners, at = [i for i, letter in enumerate(text) for _ in letter.encode()], 0
    for token in tokens:
        yield owners[at : at + len(token)]
        at += len(token)
    assert at == len(owners)


def by_pieces(text, tokens):
    """▁ is a space, the first one nobody wrote; <0xE6> is a byte."""
    owners, at = [i for i, letter in enumerate(text) for _ in letter.encode()], 0
    for number, token in enumerate(tokens):
        spelled = 1 if token.startswith("<0x") else len(token.replace("▁", " ").encode()) - (number == 0)
        if token == "▁" and number == 0:
            yield None
            continue
        yield owners[at : at + spelled]
        at += spelled
    assert at == len(owners)


def by_words(text, tokens):
    """Letters without their accents, one after the other; space is nobody's."""
    letters = [(i, c) for i, letter in enumerate(text) if not letter.isspace() for c in bare(letter)]
    at = 0
    for token in tokens:
        said = token.removeprefix("##")
        assert said == "".join(c for _, c in letters[at : at + len(said)])
        yield [i for i, _ in letters[at : at + len(said)]]
        at += len(said)
    assert at == len(letters)


def walked(prompt, owned):
    """Region → tokens, by the letters of each; `owned` has them."""
    parts = {}
    for name, spans in prompt.spans.items():
        if name not in ("gold", "evidence"):
            parts |= {i: name for a, b in spans for i in range(a, b)}
    order = [name for name in prompt.spans if name not in ("gold", "evidence")]
    gold = {i for a, b in prompt.spans.get("gold", ()) for i in range(a, b)}
    evidence = {i for a, b in prompt.spans.get("evidence", ()) for i in range(a, b)}
    found = {}
    for token, letters in enumerate(owned):
        if letters is None:
            continue
        solid = sorted({i for i in letters if not prompt.text[i].isspace()} or set(letters))
        inside = range(solid[0], solid[-1] + 1)
        shared = Counter(parts[i] for i in inside)
        part = max(shared, key=lambda name: (shared[name], name == parts[solid[0]], -order.index(name)))
        found.setdefault(part, []).append(token)
        if any(i in gold for i in inside if parts[i] == part):
            found.setdefault("gold", []).append(token)
        if not evidence.isdisjoint(inside):
            found.setdefault("evidence", []).append(token)
    return found


KINDS = {
    "byte-level BPE": (byte_level, by_bytes),
    "byte-level BPE, untrimmed": (lambda: byte_level(False), by_bytes),
    "SentencePiece BPE": (llama, by_pieces),
    "SentencePiece unigram": (unigram, by_pieces),
    "WordPiece": (wordpiece, by_words),
}


@pytest.fixture(scope="module")
def made():
    return {name: make() for name, (make, _) in KINDS.items()}


def compare(tokenizer, walk, sample):
    prompt = prompt_of(sample)
    located = ModelTokenizer(tokenizer).locate(prompt.text)
    assert located.covers is not None
    tokens = tokenizer.convert_ids_to_tokens(located.ids)
    owned = list(walk(prompt.text, tokens))
    found = tokens_of(prompt, located.covers)
    if owned[0] is None:  # a space that nobody wrote, before the first word
        assert found["template"][0] == 0
        found["template"] = found["template"][1:]
    assert found == walked(prompt, owned)
    return tokens, owned, found


@pytest.mark.parametrize("kind", KINDS)
def test_regions_are_recovered_exactly(made, kind):
    tokens, owned, found = compare(made[kind], KINDS[kind][1], ASKED)
    text = prompt_of(ASKED).text
    assert any(len(token) > 2 for token in tokens)  # it has learnt something
    assert len(tokens) < len(text.encode())
    told = {i for token in found["evidence"] for i in owned[token]}
    for answer in ("Łodzi", SHIRO[4:7], "Крепость"):
        start = text.index(answer)
        assert set(range(start, start + len(answer))) <= told


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(st.lists(st.tuples(ANY, st.booleans(), st.integers(0, 9), st.integers(1, 9)), max_size=4), ANY)
def test_regions_of_any_text_are(made, kind, told, question):
    passages = [Passage("", text, gold, ((a, a + n),) if a + n <= len(text) else ()) for text, gold, a, n in told]
    compare(made[kind], KINDS[kind][1], Sample("x", question, ("y",), tuple(passages)))
