"""Prompting and batching: samples and raw prompts become token ids with regions, and share batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import floatscope as fs
from floatscope.errors import UserError
from floatscope.pipelines.batching import limit_threads, make_batches
from floatscope.pipelines.canvas_layout import CanvasLayout, plan_layout
from floatscope.pipelines.prompting import (
    PromptConfig,
    batch_regions,
    build_items,
    encode_prompts,
    encode_samples,
    find_too_long,
    list_prompts,
)
from floatscope.tasks.sample import Sample
from floatscope.tasks.sample_files import read_samples
from floatscope.tasks.template import load_template

SAMPLES = read_samples("twin:reading-5", 5)


@pytest.fixture(scope="module", params=["twin:arm", "twin:mdm"])
def model(request):
    return fs.load(request.param, device="cpu")


@pytest.mark.parametrize("kind", ["mdm", "arm"])
def test_a_layout_counts_the_positions_of_a_decoding(kind):
    model = fs.load(f"twin:{kind}")
    suffix = (9, 9, 9) if kind == "mdm" else ()
    out = fs.decode(model, [[5, 6, 7], [5]], new_tokens=4, suffix=suffix, stop=False)
    layout = plan_layout(model, 4, suffix)
    assert layout == out.layout
    assert out.answer_start == 3
    assert out.tokens.shape[1] == layout.length(3)
    assert max(step.before.tokens.shape[1] for step in out) == layout.longest_forward(3)
    assert out.initial_canvas.tokens.shape[1] == (3 if layout.grows else layout.length(3))
    assert out.tokens[0, slice(*layout.suffix_span(3))].tolist() == list(suffix)
    assert out.tokens[0, slice(*layout.answer_span(3))].tolist() == out.tokens[0, 3:7].tolist()


def test_one_prompt_and_several_are_lists_of_prompts():
    message = {"role": "user", "content": "What floats?"}
    assert list_prompts("What floats?") == ["What floats?"]
    assert list_prompts([1, 2]) == [[1, 2]]
    assert list_prompts(message) == list_prompts([message]) == [[message]]
    assert list_prompts(["a", [1, 2]]) == ["a", [1, 2]]
    assert list_prompts(torch.tensor([1, 2])) == [[1, 2]]


def test_texts_and_token_ids_are_encoded(model):
    (ids,) = encode_prompts(model, "Where does Mira live?")
    assert ids == model.tokenizer.encode("Where does Mira live?", chat=False)
    assert encode_prompts(model, [ids, ids[:2]]) == [ids, ids[:2]]


def test_settings_name_the_template_and_its_digest():
    template = load_template("instruct")
    assert PromptConfig(template, passages=5).as_json == {
        "template": "instruct",
        "template_sha256": template.sha256,
        "passages": 5,
        "shots": 0,
        "placement": None,
        "extra_masks": 0,
        "filler": "",
        "attention": False,
    }


def test_items_have_the_tokens_of_their_regions(model):
    for item, sample in zip(encode_samples(model, SAMPLES, None, CanvasLayout(4)), SAMPLES, strict=True):
        assert item.prompt == load_template().prompt(sample)
        gold = next(passage for passage in sample.passages if passage.gold)
        text = model.tokenizer.decode([item.ids[at] for at in item.tokens["gold"]])
        assert text.strip() == gold.text
        parts = [tokens for name, tokens in item.tokens.items() if name not in ("gold", "evidence")]
        assert sorted(at for tokens in parts for at in tokens) == list(range(len(item.ids)))


def test_texts_become_samples_with_one_region(model):
    first, second = encode_samples(model, ["What floats?", SAMPLES[0]], None, CanvasLayout(4))
    assert first.sample == Sample("prompt-1", "What floats?", ())
    assert set(first.tokens) <= {"prompt", "template", "bos"}
    assert len(first.tokens["prompt"]) >= 3
    assert second.sample is SAMPLES[0]
    with pytest.raises(UserError, match="sample 'prompt-2' is empty; give it some text"):
        encode_samples(model, ["What floats?", " "], None, CanvasLayout(4))


def test_items_without_cuts_are_the_encoded_samples(model):
    items, notes = build_items(model, SAMPLES, PromptConfig(load_template()), None, 4, 0)
    assert (items, notes) == (encode_samples(model, SAMPLES, None, CanvasLayout(4)), [])


def test_prompts_that_exceed_the_context_are_cut_and_can_be_listed(model):
    config = PromptConfig(load_template(), shots=1)
    full, _ = build_items(model, SAMPLES, config, None, 4, 0)
    longest = max(full, key=lambda item: len(item.ids))
    suffix = len(model.tokenizer.suffix) if model.spec.paradigm == "mdm" else 0
    short = replace(model, spec=replace(model.spec, context=len(longest.ids) + 3 + suffix))
    too_long = {item.sample.id for item in full if len(item.ids) == len(longest.ids)}
    assert find_too_long(short, SAMPLES, config, None, 4, 0) == too_long
    assert find_too_long(model, SAMPLES, config, None, 4, 0) == set()
    cut, notes = build_items(short, SAMPLES, config, None, 4, 0)
    assert notes == [f"{len(too_long)} of 5 prompts exceeded {len(longest.ids) - 1} tokens and lost passages or shots"]
    assert {new.sample.id for new, old in zip(cut, full, strict=True) if new.ids != old.ids} == too_long


def test_regions_of_a_batch_are_padded_on_the_left(model):
    items = encode_samples(model, SAMPLES, None, CanvasLayout(4))
    regions = batch_regions(items, CanvasLayout(4, (7, 8)), extra_regions=("shot 1",))
    width = max(len(item.ids) for item in items)
    member = {name: regions.member[..., number] for number, name in enumerate(regions.names)}  # [batch, token]
    assert not member["shot 1"].any()
    for row, item in enumerate(items):
        pad = width - len(item.ids)
        assert member["gold"][row].nonzero().flatten().tolist() == [pad + at for at in item.tokens["gold"]]
        assert member["answer"][row].nonzero().flatten().tolist() == list(range(width, width + 4))
        assert member["template"][row, width + 4 :].all()


def test_batches_have_the_longest_prompts_first(model):
    items = encode_samples(model, SAMPLES, None, CanvasLayout(4))
    for size in (None, 1, 2, 9):
        batches = make_batches(model, items, size)
        assert max(map(len, batches)) <= (size or 8)
        lengths = [len(item.ids) for batch in batches for item in batch]
        assert lengths == sorted(map(len, (item.ids for item in items)), reverse=True)


def test_prompts_of_different_length_do_not_share_a_batch_without_padding(model):
    unpadded = replace(model, spec=replace(model.spec, supports_padding=False))
    for batch in make_batches(unpadded, encode_samples(model, SAMPLES, None, CanvasLayout(4))):
        assert len({len(item.ids) for item in batch}) == 1
    with pytest.raises(UserError, match="a batch must hold at least 1 sample, got 0"):
        make_batches(model, [], 0)


def test_small_models_run_on_one_thread(model):
    with limit_threads(model):
        assert torch.get_num_threads() == 1
