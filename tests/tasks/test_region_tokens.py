"""Region tokens of trained tokenizers of all kinds, compared with a walk along the text."""

from __future__ import annotations

import unicodedata
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from example_counts import examples
from floatscope.models.tokenizer import ModelTokenizer
from floatscope.tasks.regions import find_region_tokens
from floatscope.tasks.sample import Passage, Sample
from floatscope.tasks.template import load_template

ŁÓDŹ = "Zażółć gęślą jaźń w Łodzi 🎉🎉, naïve café"
SHIRO = "松本城は長野県にある。 Die Burg heißt Крепость 𝄞"
PASSAGES = (
    Passage("", ŁÓDŹ, True, ((ŁÓDŹ.index("Łodzi"), ŁÓDŹ.index("Łodzi") + 5),)),
    Passage("", SHIRO, True, ((4, 7), (SHIRO.index("Крепость"), SHIRO.index("Крепость") + 8))),
    Passage("", "Nobody knows."),
)
SAMPLE = Sample("a", "Où est la 城 de “Łódź”, жители?", ("Łodzi",), PASSAGES)
LETTERS = sorted(set(load_template().prompt(SAMPLE).text + "0123456789") - {"\n"})
ANY = st.text(st.sampled_from([*LETTERS, " ", "\n"]), min_size=1, max_size=20)


def make_byte_level(trim=True):
    """Like GPT-2, Llama 3, LLaDA and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor, tokenizer.decoder = processors.ByteLevel(trim_offsets=trim), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return train(tokenizer, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))


def make_llama():
    """SentencePiece BPE with a token for every byte, like Llama and Mistral."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    trained = train(tokenizer, trainer, replace(SAMPLE, question="Who?", passages=PASSAGES[::2]))
    assert "松" not in trained.get_vocab()  # it is encoded as bytes
    return trained


def make_unigram():
    """SentencePiece with a unigram model, like T5."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    alphabet = [*LETTERS, "\n", "▁"]
    return train(
        tokenizer,
        trainers.UnigramTrainer(
            vocab_size=300, initial_alphabet=alphabet, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
        ),
    )


def make_wordpiece():
    """Like BERT, without case and accents."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    alphabet = sorted({c for letter in LETTERS for c in strip_accents(letter)})
    trainer = trainers.WordPieceTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=["[UNK]"], show_progress=False
    )
    trained = train(tokenizer, trainer)
    vocabulary = trained.get_vocab()
    missing = [f"##{letter}" for letter in alphabet if f"##{letter}" not in vocabulary]
    vocabulary |= {token: len(vocabulary) + i for i, token in enumerate(missing)}
    trained.backend_tokenizer.model = models.WordPiece(vocabulary, unk_token="[UNK]")
    return trained


def train(tokenizer, trainer, sample=SAMPLE):
    tokenizer.train_from_iterator(load_template().prompt(sample).text.splitlines(keepends=True) * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def strip_accents(letter):
    """Remove case and accents."""
    return "".join(c for c in unicodedata.normalize("NFD", letter.lower()) if unicodedata.category(c) != "Mn")


def walk_bytes(text, tokens):
    """Yield the characters of each token; a letter of a byte-level token is a byte."""
    owners, at = [i for i, letter in enumerate(text) for _ in letter.encode()], 0
    for token in tokens:
        yield owners[at : at + len(token)]
        at += len(token)
    assert at == len(owners)


def walk_pieces(text, tokens):
    """Yield the characters of each token; ▁ is a space, the first one is not in the text, and <0xE6> is a byte."""
    owners, at = [i for i, letter in enumerate(text) for _ in letter.encode()], 0
    for number, token in enumerate(tokens):
        length = 1 if token.startswith("<0x") else len(token.replace("▁", " ").encode()) - (number == 0)
        if token == "▁" and number == 0:
            yield None
            continue
        yield owners[at : at + length]
        at += length
    assert at == len(owners)


def walk_words(text, tokens):
    """Yield the characters of each token; letters have no accents, and spaces belong to no token."""
    letters = [(i, c) for i, letter in enumerate(text) if not letter.isspace() for c in strip_accents(letter)]
    at = 0
    for token in tokens:
        piece = token.removeprefix("##")
        assert piece == "".join(c for _, c in letters[at : at + len(piece)])
        yield [i for i, _ in letters[at : at + len(piece)]]
        at += len(piece)
    assert at == len(letters)


def find_tokens_by_walking(prompt, characters):
    """Return region → tokens, from the characters of each token."""
    parts = {}
    for name, spans in prompt.spans.items():
        if name not in ("gold", "evidence"):
            parts |= {i: name for a, b in spans for i in range(a, b)}
    order = [name for name in prompt.spans if name not in ("gold", "evidence")]
    gold = {i for a, b in prompt.spans.get("gold", ()) for i in range(a, b)}
    evidence = {i for a, b in prompt.spans.get("evidence", ()) for i in range(a, b)}
    regions = {}
    for token, letters in enumerate(characters):
        if letters is None:
            continue
        inked = sorted({i for i in letters if not prompt.text[i].isspace()} or set(letters))
        inside = range(inked[0], inked[-1] + 1)
        shared = Counter(parts[i] for i in inside)
        part = max(shared, key=lambda name: (shared[name], name == parts[inked[0]], -order.index(name)))
        regions.setdefault(part, []).append(token)
        if any(i in gold for i in inside if parts[i] == part):
            regions.setdefault("gold", []).append(token)
        if not evidence.isdisjoint(inside):
            regions.setdefault("evidence", []).append(token)
    return regions


KINDS = {
    "byte-level BPE": (make_byte_level, walk_bytes),
    "byte-level BPE, untrimmed": (lambda: make_byte_level(False), walk_bytes),
    "SentencePiece BPE": (make_llama, walk_pieces),
    "SentencePiece unigram": (make_unigram, walk_pieces),
    "WordPiece": (make_wordpiece, walk_words),
}


@pytest.fixture(scope="module")
def tokenizers_by_kind():
    return {name: make() for name, (make, _) in KINDS.items()}


def compare(tokenizer, walk, sample):
    prompt = load_template().prompt(sample)
    encoding = ModelTokenizer(tokenizer).encode_with_offsets(prompt.text)
    assert encoding.offsets is not None
    tokens = tokenizer.convert_ids_to_tokens(encoding.ids)
    characters = list(walk(prompt.text, tokens))
    regions = find_region_tokens(prompt, encoding.offsets)
    if characters[0] is None:  # the space before the first word is not in the text
        assert regions["template"][0] == 0
        regions["template"] = regions["template"][1:]
    assert regions == find_tokens_by_walking(prompt, characters)
    return tokens, characters, regions


@pytest.mark.parametrize("kind", KINDS)
def test_region_tokens_match_the_walk(tokenizers_by_kind, kind):
    tokens, characters, regions = compare(tokenizers_by_kind[kind], KINDS[kind][1], SAMPLE)
    text = load_template().prompt(SAMPLE).text
    assert any(len(token) > 2 for token in tokens)  # training merged something
    assert len(tokens) < len(text.encode())
    evidence = {i for token in regions["evidence"] for i in characters[token]}
    for answer in ("Łodzi", SHIRO[4:7], "Крепость"):
        start = text.index(answer)
        assert set(range(start, start + len(answer))) <= evidence


@pytest.mark.parametrize("kind", KINDS)
@examples(60)
@given(st.lists(st.tuples(ANY, st.booleans(), st.integers(0, 9), st.integers(1, 9)), max_size=4), ANY)
def test_region_tokens_of_any_text_match_the_walk(tokenizers_by_kind, kind, entries, question):
    passages = [Passage("", text, gold, ((a, a + n),) if a + n <= len(text) else ()) for text, gold, a, n in entries]
    compare(tokenizers_by_kind[kind], KINDS[kind][1], Sample("x", question, ("y",), tuple(passages)))
