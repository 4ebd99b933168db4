"""The twins' tokenizer: byte-level BPE over words, split as Qwen2 splits them, with a small vocabulary.

    tokenizer = train_tokenizer(texts, size=4096)
    words = WordTokenizer(tokenizer)
    words.encode(" Mira plays the flute.")                # the same ids as the tokenizer's, from a table of words
    words.eos_id, words.bos_id, words.mask_id             # the last three ids

A text is split into words first, so a word has the same tokens wherever it occurs, and millions of rows can be
assembled from a table.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

EOS, BOS, MASK = SPECIAL = ("<|endoftext|>", "<|beginoftext|>", "<|mask|>")
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(texts: Iterable[str], size: int) -> Any:
    """Train a fast transformers tokenizer with `size` entries; the special tokens are the last ones."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    begin = (BOS, backend.token_to_id(BOS))
    backend.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[begin])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=EOS, bos_token=BOS, mask_token=MASK, pad_token=EOS
    )


class WordTokenizer:
    """Encodes text word by word; each distinct word is tokenized once."""

    def __init__(self, tokenizer: Any) -> None:
        import regex

        self._tokenizer = tokenizer
        self._split = regex.compile(SPLIT)
        self._ids_by_word: dict[str, list[int]] = {}
        self.eos_id, self.bos_id, self.mask_id = (tokenizer.convert_tokens_to_ids(token) for token in SPECIAL)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens."""
        ids: list[int] = []
        for word in self._split.findall(text):
            if word not in self._ids_by_word:
                self._ids_by_word[word] = self._tokenizer(word, add_special_tokens=False)["input_ids"]
            ids += self._ids_by_word[word]
        return ids
