"""Training rows, losses, checkpoints and segments of the twins."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import re
import signal
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small import SMALL

import floatscope as fs
from floatscope.lab.training.checkpoint import MAX_SHARD_BYTES, Training, restore_checkpoint, save_checkpoint
from floatscope.lab.training.progress import Progress
from floatscope.lab.training.text import read_text
from floatscope.lab.twins import train
from floatscope.lab.twins.corpus import batches, fixed_world, prepare_corpus
from floatscope.lab.twins.examples import ANSWER, CONTEXT, TAIL, TEXT, build_prompt, make_rows
from floatscope.lab.twins.segments import train_segment
from floatscope.lab.twins.tokenizer import WordTokenizer
from floatscope.lab.twins.train import (
    Recipe,
    build_module,
    build_optimizer,
    masked_loss,
    next_token_loss,
    train_steps,
)
from floatscope.lab.twins.world import World, make_reading

RECIPE = replace(SMALL["arm"], steps=60)


@pytest.fixture(scope="module")
def words(corpus):
    return WordTokenizer(corpus.open()[0])


def test_word_tokenizer_equals_the_tokenizer(corpus, words):
    tokenizer, _ = corpus.open()
    for seed in range(20):
        sample = make_reading(World.generate(seed, 9), Random(seed), "x")
        text = build_prompt(sample) + " Velmora, isn't it?\n\n  7 é 东"
        assert words.encode(text) == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer("a")["input_ids"][0] == words.bos_id == RECIPE.vocabulary - 2
    assert words.mask_id == RECIPE.mask_id
    assert len(tokenizer) == RECIPE.vocabulary


def test_rows_are_full_and_every_token_has_a_role(corpus, words):
    tokenizer, text = corpus.open()
    rows = make_rows(words, text, fixed_world(), 0, 50, 256, 6)
    assert rows.tokens.shape == rows.roles.shape == (50, 256)
    assert (rows.tokens[:, 0] == words.bos_id).all()
    assert set(np.unique(rows.roles)) == {TEXT, CONTEXT, ANSWER, TAIL}
    assert (rows.tokens[rows.roles == TAIL] == words.eos_id).all()
    ends = (rows.roles[:, :-1] == ANSWER) & (rows.roles[:, 1:] != ANSWER)
    assert (rows.tokens[:, :-1][ends] == words.eos_id).all()  # an answer ends with the end of text
    for tokens, roles in zip(rows.tokens, rows.roles, strict=True):
        if (roles == ANSWER).any():
            assert tokenizer.decode(tokens[: int((roles == ANSWER).argmax())]).endswith("Answer:")
    again = make_rows(words, text, fixed_world(), 0, 50, 256, 6)
    np.testing.assert_array_equal(rows.tokens, again.tokens)


def test_batches_do_not_depend_on_workers(corpus):
    alone, prefetched = (batches(corpus, RECIPE, 3, workers) for workers in (0, 1))
    for _ in range(4):
        np.testing.assert_array_equal(next(alone).tokens, next(prefetched).tokens)
    prefetched.close()
    later = batches(corpus, RECIPE, 5, 0)
    first = batches(corpus, RECIPE, 3, 0)
    next(first), next(first)
    np.testing.assert_array_equal(next(first).tokens, next(later).tokens)


def random_rows(seed: int, rows: int = 6, length: int = 20):
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 30, (rows, length), generator=rng)
    roles = torch.zeros(rows, length, dtype=torch.long)
    roles[:, 8:11], roles[:, 11:13] = ANSWER, TAIL
    roles[-1] = TEXT
    table = torch.randn(40, 40, generator=rng)
    return tokens, roles, lambda ids: table[ids]


@pytest.mark.parametrize("seed", range(3))
def test_next_token_loss_is_the_mean_of_all_tokens_and_of_the_answers(seed):
    tokens, roles, forward = random_rows(seed)
    text, answers = next_token_loss(forward, tokens, roles)
    losses = {True: [], False: []}
    for b in range(6):
        for i in range(19):
            loss = -float(forward(tokens)[b, i].double().log_softmax(-1)[tokens[b, i + 1]])
            losses[bool(roles[b, i + 1] == ANSWER)].append(loss)
    assert float(answers) == pytest.approx(np.mean(losses[True]), rel=1e-5)
    assert float(text) == pytest.approx(np.mean(losses[True] + losses[False]), rel=1e-5)


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_masked_loss_is_weighted_by_one_over_t_and_counts_masks_only(seed, shift):
    """Restated from the model's input: even rows are masked at random, odd rows have their answers masked."""
    tokens, roles, table = random_rows(seed)
    inputs = []

    def forward(ids):
        inputs.append(ids)
        return table(ids)

    diffusion, answers = masked_loss(forward, tokens, roles, torch.Generator().manual_seed(seed), 39, shift)
    t = torch.rand(6, 1, generator=torch.Generator().manual_seed(seed)) * 0.98 + 0.02
    masked = inputs[0] == 39
    assert torch.equal(inputs[0][~masked], tokens[~masked])
    reads = [b for b in range(6) if b % 2 == 1 and (roles[b] == ANSWER).any()]
    assert reads == [1, 3]
    weighted, answer_losses, tail_losses = 0.0, [], []
    logits = table(inputs[0]).double().log_softmax(-1)
    for b in range(6):
        for i in range(1 if shift else 0, 20):
            if not masked[b, i]:
                continue
            loss = -float(logits[b, i - 1 if shift else i][tokens[b, i]])
            if b not in reads:
                weighted += loss / float(t[b])
            else:
                assert roles[b, i] >= ANSWER
                (answer_losses if roles[b, i] == ANSWER else tail_losses).append(loss)
    assert float(diffusion) == pytest.approx(weighted / (4 * (19 if shift else 20)), rel=1e-4)
    expected = np.mean(answer_losses or [0]) + 0.1 * np.mean(tail_losses or [0])
    assert float(answers) == pytest.approx(expected, rel=1e-4)


def test_answers_are_masked_completely_or_at_a_rate_of_their_own():
    roles = torch.full((400, 63), CONTEXT)
    roles[:, 2:22], roles[:, 22:32], roles[:, 33:53], roles[:, 53:63] = ANSWER, TAIL, ANSWER, TAIL
    masks = train._sample_answer_masks(roles, torch.Generator().manual_seed(0))
    assert not masks[roles == CONTEXT].any()
    shares = torch.cat([masks[:, 2:32], masks[:, 33:63]]).double().mean(-1)
    partial = shares[shares < 1]
    assert float((shares == 1).double().mean()) == pytest.approx(train.FULL_MASK_RATE, abs=0.08)
    assert [float(partial.quantile(q)) for q in (0.1, 0.5, 0.9)] == pytest.approx([0.1, 0.5, 0.9], abs=0.08)
    first, second = shares.chunk(2)
    assert not torch.equal(first == 1, second == 1)  # two answers of a row are masked independently


def test_rows_have_long_answers_dates_and_many_passages(corpus, words):
    tokenizer, text = corpus.open()
    rows = make_rows(words, text, fixed_world(), 0, 40, 1024, 8)
    texts = [tokenizer.decode(row) for row in rows.tokens]
    assert any(re.search(r"Answer: (\w+) \w+ [^.]+\. \1 [^.]+\. \1 ", text) for text in texts)
    assert any("Last updated in 20" in text for text in texts)
    numbers = [int(number) for text in texts for number in re.findall(r"Document (\d+):", text)]
    assert 16 < max(numbers) <= 32
    short = make_rows(words, text, fixed_world(), 0, 40, 512, 8)
    assert all(f"Document {n}:" not in tokenizer.decode(row) for row in short.tokens for n in range(17, 33))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["arm", "mdm", "mdm-adapted"])
def test_loss_falls(corpus, kind, monkeypatch):
    monkeypatch.setattr(train, "LOG_EVERY", 50)
    recipe = replace(RECIPE, steps=100, warmup=10, lr=3e-3)
    module = build_module(recipe)
    progress = Progress(0, [])
    rows = batches(corpus, recipe, 0, 0)
    list(train_steps(module, build_optimizer(module, recipe), recipe, kind, rows, progress, lambda: False))
    (_, text, answers), (_, later_text, later_answers) = progress.losses
    assert later_text < text - 0.3
    assert later_answers < answers


def train_in_segments(
    folder, corpus, recipe: Recipe, kind: str, stops: list[int]
) -> tuple[dict[str, torch.Tensor], list]:
    """Train in segments that end at `stops`, each from the checkpoint of the one before."""
    for stop in stops:
        module = build_module(recipe)
        optimizer = build_optimizer(module, recipe)
        training = Training(folder, kind, recipe, "files", module, optimizer)
        progress = restore_checkpoint(training) or Progress(0, [])
        rows = batches(corpus, recipe, progress.step, 0)
        list(train_steps(module, optimizer, recipe, kind, rows, progress, lambda p=progress, s=stop: p.step >= s))
        save_checkpoint(training, progress)
    return module.state_dict(), progress.losses


@pytest.mark.parametrize("kind", ["arm", "mdm"])
def test_segments_give_the_weights_of_one_training(tmp_path, corpus, kind, monkeypatch):
    monkeypatch.setattr(train, "LOG_EVERY", 4)
    recipe = replace(RECIPE, steps=10)
    unbroken, losses = train_in_segments(tmp_path / "unbroken", corpus, recipe, kind, [10])
    resumed, resumed_losses = train_in_segments(tmp_path / "segments", corpus, recipe, kind, [2, 3, 10])
    assert losses == resumed_losses
    assert [step for step, *_ in losses] == [4, 8, 10]
    assert all(torch.equal(unbroken[name], resumed[name]) for name in unbroken)
    assert [p.name for p in (tmp_path / "segments").iterdir()] == ["step-000010"]


def take_step(folder, recipe: Recipe) -> Training:
    module = build_module(recipe)
    optimizer = build_optimizer(module, recipe)
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return Training(folder, "arm", recipe, "files", module, optimizer)


def test_checkpoint_has_small_shards_and_belongs_to_its_training(tmp_path):
    recipe = Recipe(steps=10)  # the real size
    training = take_step(tmp_path, recipe)
    checkpoint = save_checkpoint(training, Progress(1, []))
    sizes = [shard.stat().st_size for shard in checkpoint.glob("*.safetensors")]
    assert max(sizes) <= MAX_SHARD_BYTES + 10_000
    assert len(sizes) > 5
    with pytest.raises(fs.UserError, match=r"belongs to another training \(arm, lr 0\.001, not 0\.5\)"):
        restore_checkpoint(replace(training, recipe=replace(recipe, lr=0.5)))
    with pytest.raises(fs.UserError, match=r"belongs to another training \(arm, the same recipe\); use another --out"):
        restore_checkpoint(replace(training, kind="mdm"))
    with pytest.raises(fs.UserError, match=r"was trained on other files or another base; give those, or use another"):
        restore_checkpoint(replace(training, corpus_digest="other files"))
    assert save_checkpoint(training, Progress(1, [])) == checkpoint  # an existing checkpoint is not written again
    assert restore_checkpoint(training).step == 1
    progress, shard = (checkpoint / "progress.json").read_text(), next(checkpoint.glob("shard-00002*"))
    no_step = progress.replace('"step": 1', '"step": -1')
    for name, content in (
        ("progress.json", "{}"),
        ("progress.json", "[1"),
        ("progress.json", no_step),
        (shard.name, "short"),
    ):
        (checkpoint / name).write_text(content)
        with pytest.raises(fs.UserError, match=r"is damaged .*; remove (it|.*step-000001) to start again"):
            restore_checkpoint(training)
        (checkpoint / "progress.json").write_text(progress)


def test_partial_checkpoint_is_ignored_and_removed_by_the_next(tmp_path):
    training = take_step(tmp_path, replace(RECIPE, steps=10))
    save_checkpoint(training, Progress(1, []))
    (tmp_path / "step-000002.part").mkdir()
    (tmp_path / "step-000002.part" / "shard-00001-of-00002.safetensors").write_text("half of it")
    assert restore_checkpoint(training).step == 1
    save_checkpoint(training, Progress(3, []))
    assert [p.name for p in tmp_path.iterdir()] == ["step-000003"]


def test_interrupted_segment_saves_its_steps(tmp_path, corpus, monkeypatch):
    monkeypatch.setattr(train, "LOG_EVERY", 10)
    tiny = {kind: replace(recipe, steps=15, batch=2) for kind, recipe in SMALL.items()}
    folder = tmp_path / "twins"
    folder.mkdir()
    (folder / "corpus").symlink_to(corpus.folder)
    segment = train_segment(folder, [], tiny, minutes=5.0, device="cpu")
    assert next(segment).step == 10
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        next(segment)
    (checkpoint,) = (folder / "arm").iterdir()
    assert checkpoint.name == "step-000010"
    assert json.loads((checkpoint / "progress.json").read_text())["seconds"] > 0
    rest = train_segment(folder, [], tiny, minutes=5.0, device="cpu")
    assert [(event.kind, event.step, event.finished) for event in (next(rest), next(rest))] == [
        ("arm", 15, False),
        ("arm", 15, True),
    ]


def test_adapted_twin_starts_from_the_arm(tmp_path, corpus):
    tiny = {kind: replace(recipe, steps=2, lr=0.0, weight_decay=0.0) for kind, recipe in SMALL.items()}
    folder = tmp_path / "twins"
    folder.mkdir()
    (folder / "corpus").symlink_to(corpus.folder)
    for event in train_segment(folder, [], tiny, minutes=5.0, device="cpu"):
        if event.kind == "mdm-adapted" and event.finished:
            break
    arm, adapted = (load_file(folder / "models" / kind / "model.safetensors") for kind in ("arm", "mdm-adapted"))
    assert all(torch.equal(arm[name], adapted[name]) for name in arm)
    assert all(not adapted[name].any() for name in adapted.keys() - arm.keys())  # Qwen2's biases


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"  \n", "is empty"),
        ("binary.txt", b"abc\0def", "is binary: it contains zero bytes"),
        ("latin.txt", b"caf\xe9", "is not UTF-8 text"),
        ("bad.jsonl", b'{"no": "text"}', 'is not a file of JSON lines with a "text" field'),
        ("cut.txt.xz", lzma.compress(b"some text" * 999)[:40], "cannot read"),
    ],
)
def test_unusable_text_is_refused(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(fs.UserError, match=message):
        prepare_corpus(tmp_path / "corpus", [path], RECIPE)


def test_text_can_be_compressed_or_json_lines(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("héllo".encode()))
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "one"}) + "\n\n" + json.dumps({"text": "two"}))
    assert read_text(tmp_path / "a.txt.gz") == "héllo"
    assert read_text(tmp_path / "b.jsonl") == "one\ntwo"


def test_changed_text_is_refused(tmp_path, corpus):
    other = tmp_path / "other.txt"
    other.write_text("other words")
    with pytest.raises(fs.UserError, match=r"was prepared from text\.txt; give those, or another --out"):
        prepare_corpus(corpus.folder, [other], RECIPE)
    with pytest.raises(fs.UserError, match="there is no training text; give --text FILE, once per file"):
        prepare_corpus(tmp_path / "new", [], RECIPE)


def test_corpus_of_another_vocabulary_is_refused(corpus):
    with pytest.raises(fs.UserError, match=r"was prepared for a vocabulary of 1500, not 4096; give the settings"):
        prepare_corpus(corpus.folder, [], Recipe())


def test_vocabulary_larger_than_the_text_allows_is_refused(tmp_path):
    text = tmp_path / "few.txt"
    text.write_text("only a few words")
    with pytest.raises(fs.UserError, match=r"the text yields \d+ tokens, not 60000"):
        prepare_corpus(tmp_path / "corpus", [text], replace(RECIPE, vocabulary=60000))
