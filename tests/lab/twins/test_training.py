"""Rows, losses and legs: what is masked, what is counted, and that two legs are one."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import signal
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small import SMALL

import floatscope as fs
from floatscope.lab.training.checkpoint import PIECE, Training, restore, save
from floatscope.lab.training.progress import Progress
from floatscope.lab.twins import legs, material, train
from floatscope.lab.twins.lessons import ANSWER, CONTEXT, TAIL, TEXT, make_rows, prompt_of
from floatscope.lab.twins.train import (
    Recipe,
    masked_loss,
    new_module,
    next_token_loss,
    optimizer_for,
    train_steps,
)
from floatscope.lab.twins.words import Words
from floatscope.lab.twins.world import World, reading

RECIPE = replace(SMALL["arm"], steps=60)


@pytest.fixture(scope="module")
def words(prepared):
    return Words(prepared.open()[0])


def test_words_are_the_tokenizers(prepared, words):
    tokenizer, _ = prepared.open()
    for seed in range(20):
        text = prompt_of(reading(World.fresh(seed, 9), Random(seed), "x")) + " Velmora, isn't it?\n\n  7 é 东"
        assert words(text) == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer("a")["input_ids"][0] == words.bos == RECIPE.vocabulary - 2
    assert words.mask == RECIPE.mask_id
    assert len(tokenizer) == RECIPE.vocabulary


def test_rows_are_full_and_say_what_every_token_is(prepared, words):
    tokenizer, text = prepared.open()
    rows = make_rows(words, text, material.fixed_world(), 0, 50, 256, 6)
    assert rows.tokens.shape == rows.roles.shape == (50, 256)
    assert (rows.tokens[:, 0] == words.bos).all()
    assert set(np.unique(rows.roles)) == {TEXT, CONTEXT, ANSWER, TAIL}
    assert (rows.tokens[rows.roles == TAIL] == words.eos).all()
    ends = (rows.roles[:, :-1] == ANSWER) & (rows.roles[:, 1:] != ANSWER)
    assert (rows.tokens[:, :-1][ends] == words.eos).all()  # an answer ends with the end of text
    for tokens, roles in zip(rows.tokens, rows.roles, strict=True):
        if (roles == ANSWER).any():
            assert tokenizer.decode(tokens[: int((roles == ANSWER).argmax())]).endswith("Answer:")
    again = make_rows(words, text, material.fixed_world(), 0, 50, 256, 6)
    np.testing.assert_array_equal(rows.tokens, again.tokens)


def test_batches_are_the_same_whoever_makes_them(prepared):
    alone, ahead = (material.batches(prepared, RECIPE, 3, workers) for workers in (0, 2))
    for _ in range(4):
        np.testing.assert_array_equal(next(alone).tokens, next(ahead).tokens)
    ahead.close()
    later = material.batches(prepared, RECIPE, 5, 0)
    first = material.batches(prepared, RECIPE, 3, 0)
    next(first), next(first)
    np.testing.assert_array_equal(next(first).tokens, next(later).tokens)


def some_rows(seed: int, rows: int = 6, length: int = 20):
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 30, (rows, length), generator=draw)
    roles = torch.zeros(rows, length, dtype=torch.long)
    roles[:, 8:11], roles[:, 11:13] = ANSWER, TAIL
    roles[-1] = TEXT
    table = torch.randn(40, 40, generator=draw)
    return tokens, roles, lambda ids: table[ids]


@pytest.mark.parametrize("seed", range(3))
def test_the_next_token_loss_is_the_mean_and_that_of_the_answers(seed):
    tokens, roles, forward = some_rows(seed)
    whole, answers = next_token_loss(forward, tokens, roles, torch.Generator())
    each = {True: [], False: []}
    for b in range(6):
        for i in range(19):
            loss = -float(forward(tokens)[b, i].double().log_softmax(-1)[tokens[b, i + 1]])
            each[bool(roles[b, i + 1] == ANSWER)].append(loss)
    assert float(answers) == pytest.approx(np.mean(each[True]), rel=1e-5)
    assert float(whole) == pytest.approx(np.mean(each[True] + each[False]), rel=1e-5)


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_the_masked_loss_is_weighted_by_one_over_t_and_sees_only_masks(seed, shift):
    """Restated from what the model was shown: even rows are diffused, odd ones with answers have those masked."""
    tokens, roles, table = some_rows(seed)
    shown = []

    def forward(ids):
        shown.append(ids)
        return table(ids)

    diffusion, answers = masked_loss(forward, tokens, roles, torch.Generator().manual_seed(seed), 39, shift)
    t = torch.rand(6, 1, generator=torch.Generator().manual_seed(seed)) * 0.98 + 0.02
    masked = shown[0] == 39
    assert torch.equal(shown[0][~masked], tokens[~masked])
    reads = [b for b in range(6) if b % 2 == 1 and (roles[b] == ANSWER).any()]
    assert reads == [1, 3]
    weighted, right, tails = 0.0, [], []
    logits = table(shown[0]).double().log_softmax(-1)
    for b in range(6):
        for i in range(1 if shift else 0, 20):
            if not masked[b, i]:
                continue
            loss = -float(logits[b, i - 1 if shift else i][tokens[b, i]])
            if b not in reads:
                weighted += loss / float(t[b])
            else:
                assert roles[b, i] >= ANSWER
                (right if roles[b, i] == ANSWER else tails).append(loss)
    assert float(diffusion) == pytest.approx(weighted / (4 * (19 if shift else 20)), rel=1e-4)
    assert float(answers) == pytest.approx(np.mean(right or [0]) + 0.1 * np.mean(tails or [0]), rel=1e-4)


@pytest.mark.parametrize("kind", ["arm", "mdm", "mdm-adapted"])
def test_the_loss_falls(prepared, kind, monkeypatch):
    monkeypatch.setattr(train, "EVERY", 50)
    recipe = replace(RECIPE, steps=100, warmup=10, peak=3e-3)
    module = new_module(recipe)
    progress = Progress(0, [])
    rows = material.batches(prepared, recipe, 0, 0)
    list(train_steps(module, optimizer_for(module, recipe), recipe, kind, rows, progress, lambda: False))
    (_, text, answers), (_, later, learnt) = progress.losses
    assert later < text - 0.3
    assert learnt < answers


def trained(folder, prepared, recipe: Recipe, kind: str, stops: list[int]) -> tuple[dict[str, torch.Tensor], list]:
    """Train in legs that end at `stops`, each from the checkpoint of the one before."""
    for stop in stops:
        module = new_module(recipe)
        optimizer = optimizer_for(module, recipe)
        training = Training(folder, kind, recipe, "files", module, optimizer)
        progress = restore(training) or Progress(0, [])
        rows = material.batches(prepared, recipe, progress.step, 0)
        list(train_steps(module, optimizer, recipe, kind, rows, progress, lambda p=progress, s=stop: p.step >= s))
        save(training, progress)
    return module.state_dict(), progress.losses


@pytest.mark.parametrize("kind", ["arm", "mdm"])
def test_two_legs_are_one(tmp_path, prepared, kind, monkeypatch):
    monkeypatch.setattr(train, "EVERY", 10)
    recipe = replace(RECIPE, steps=24)
    whole, losses = trained(tmp_path / "whole", prepared, recipe, kind, [24])
    legs_, theirs = trained(tmp_path / "legs", prepared, recipe, kind, [7, 8, 24])
    assert losses == theirs
    assert [step for step, *_ in losses] == [10, 20, 24]
    assert all(torch.equal(whole[name], legs_[name]) for name in whole)
    assert [p.name for p in (tmp_path / "legs").iterdir()] == ["step-000024"]


def after_a_step(folder, recipe: Recipe) -> Training:
    module = new_module(recipe)
    optimizer = optimizer_for(module, recipe)
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return Training(folder, "arm", recipe, "files", module, optimizer)


def test_a_checkpoint_is_in_small_pieces_and_of_its_own_training(tmp_path):
    recipe = Recipe(steps=10)  # the real size
    training = after_a_step(tmp_path, recipe)
    at = save(training, Progress(1, []))
    sizes = [piece.stat().st_size for piece in at.glob("*.safetensors")]
    assert max(sizes) <= PIECE + 10_000
    assert len(sizes) > 5
    with pytest.raises(fs.UserError, match=r"is of another training \(arm, peak 0\.001, not 0\.5\); use another --out"):
        restore(replace(training, recipe=replace(recipe, peak=0.5)))
    with pytest.raises(fs.UserError, match=r"is of another training \(arm, the same recipe\); use another --out"):
        restore(replace(training, kind="mdm"))
    with pytest.raises(fs.UserError, match=r"learnt from other files or another base; give those, or use another"):
        restore(replace(training, material="other files"))
    assert save(training, Progress(1, [])) == at  # a step that is kept is left as it is
    assert restore(training).step == 1
    progress, piece = (at / "progress.json").read_text(), next(at.glob("piece-02*"))
    for name, content in (("progress.json", "{}"), ("progress.json", "[1"), (piece.name, "short")):
        (at / name).write_text(content)
        with pytest.raises(fs.UserError, match=r"is damaged .*; remove it to begin again"):
            restore(training)
        (at / "progress.json").write_text(progress)


def test_what_a_kill_left_of_a_checkpoint_is_not_read_and_goes_with_the_next(tmp_path):
    training = after_a_step(tmp_path, replace(RECIPE, steps=10))
    save(training, Progress(1, []))
    (tmp_path / "step-000002.part").mkdir()
    (tmp_path / "step-000002.part" / "piece-00.safetensors").write_text("half of it")
    assert restore(training).step == 1
    save(training, Progress(3, []))
    assert [p.name for p in tmp_path.iterdir()] == ["step-000003"]


def test_an_interrupted_leg_keeps_what_was_trained(tmp_path, prepared):
    tiny = {kind: replace(recipe, steps=150, batch=2) for kind, recipe in SMALL.items()}
    folder = tmp_path / "twins"
    folder.mkdir()
    (folder / "material").symlink_to(prepared.folder)
    leg = legs.leg(folder, [], tiny, minutes=5.0, device="cpu")
    assert next(leg).step == 100
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        next(leg)
    (checkpoint,) = (folder / "arm").iterdir()
    assert checkpoint.name == "step-000100"
    assert json.loads((checkpoint / "progress.json").read_text())["seconds"] > 0
    rest = legs.leg(folder, [], tiny, minutes=5.0, device="cpu")
    assert [(told.kind, told.step, told.finished) for told in (next(rest), next(rest))] == [
        ("arm", 150, False),
        ("arm", 150, True),
    ]


def test_the_adapted_twin_begins_with_the_arm(tmp_path, prepared):
    tiny = {kind: replace(recipe, steps=2, peak=0.0, decay=0.0) for kind, recipe in SMALL.items()}
    folder = tmp_path / "twins"
    folder.mkdir()
    (folder / "material").symlink_to(prepared.folder)
    for told in legs.leg(folder, [], tiny, minutes=5.0, device="cpu"):
        if told.kind == "mdm-adapted" and told.finished:
            break
    arm, adapted = (load_file(folder / "models" / kind / "model.safetensors") for kind in ("arm", "mdm-adapted"))
    assert all(torch.equal(arm[name], adapted[name]) for name in arm)
    assert all(not adapted[name].any() for name in adapted.keys() - arm.keys())  # Qwen2's biases


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.txt", b"  \n", "is empty"),
        ("binary.txt", b"abc\0def", "is binary: it has zero bytes"),
        ("latin.txt", b"caf\xe9", "is no UTF-8 text"),
        ("bad.jsonl", b'{"no": "text"}', 'is no file of JSON lines with a "text" each'),
        ("cut.txt.xz", lzma.compress(b"some text" * 999)[:40], "cannot read"),
    ],
)
def test_text_that_cannot_be_learnt_from_is_refused(tmp_path, name, content, said):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(fs.UserError, match=said):
        material.prepare(tmp_path / "made", [path], RECIPE)


def test_text_is_read_compressed_or_in_lines(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("héllo".encode()))
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "one"}) + "\n\n" + json.dumps({"text": "two"}))
    assert material.read_text(tmp_path / "a.txt.gz") == "héllo"
    assert material.read_text(tmp_path / "b.jsonl") == "one\ntwo"


def test_other_text_than_before_is_refused(tmp_path, prepared):
    other = tmp_path / "other.txt"
    other.write_text("other words")
    with pytest.raises(fs.UserError, match=r"was prepared from text\.txt; use those, or another --out"):
        material.prepare(prepared.folder, [other], RECIPE)
    with pytest.raises(fs.UserError, match="there is no text to learn from; give --text FILE, once for each"):
        material.prepare(tmp_path / "new", [], RECIPE)


def test_material_of_another_vocabulary_is_refused(prepared):
    with pytest.raises(fs.UserError, match=r"was prepared for a vocabulary of 1500, not 4096; give the settings"):
        material.prepare(prepared.folder, [], Recipe())


def test_a_vocabulary_larger_than_the_data_allows_is_refused(tmp_path):
    text = tmp_path / "few.txt"
    text.write_text("only a few words")
    with pytest.raises(fs.UserError, match=r"the text gives \d+ tokens, not 60000"):
        material.prepare(tmp_path / "made", [text], replace(RECIPE, vocabulary=60000))
