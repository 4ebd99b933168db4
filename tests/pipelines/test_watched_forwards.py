"""Every way to call a model is seen by `watch`, and its forwards are grouped into the right sequences."""

from __future__ import annotations

import copy
import gc

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

import floatscope as fs
from floatscope.schema import RowSource, State

SHAPE = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
PROMPT = [[1, 2, 3, 4, 5, 6, 7]]
LENGTHS = [4, 1, 2, 1]


class CachedBlock(nn.Module):
    """Attention with a key-value cache of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.past: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        if self.past is not None:
            k, v = (torch.cat(pair, 2) for pair in zip(self.past, (k, v), strict=True))
        self.past = k, v
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return x + self.out(out.transpose(1, 2).flatten(2))


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.h = nn.ModuleList([CachedBlock() for _ in range(2)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.h:
            x = block(x)
        return x

    def reset(self) -> None:
        for block in self.h:
            block.past = None


def build_arm(seed: int = 0) -> transformers.LlamaForCausalLM:
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).eval()


def build_cached(seed: int = 0) -> Cached:
    torch.manual_seed(seed)
    return Cached().eval()


@pytest.fixture(scope="module")
def arm():
    return build_arm()


@pytest.fixture
def ids():
    return torch.tensor(PROMPT)


def assert_same(one: fs.Trace, other: fs.Trace) -> None:
    assert one.arrays.keys() == other.arrays.keys()
    for name, array in one.arrays.items():
        np.testing.assert_array_equal(array, other.arrays[name], err_msg=name)
    assert one.coords == other.coords


def watch_calls(model, *calls, **settings) -> list[fs.Trace]:
    with torch.no_grad(), fs.watch(model, verify=True, **settings) as session:
        for call in calls:
            call()
    return session.traces


# ---- what counts as a forward


@pytest.mark.parametrize("build", [build_arm, build_cached])
def test_a_call_of_forward_is_a_call_of_the_model(build, ids):
    model, other = build(), build()
    (called,) = watch_calls(model, lambda: model(ids))
    (direct,) = watch_calls(other, lambda: other.forward(ids))
    assert_same(called, direct)
    assert called.arrays["keys"].tolist() == [7]


def test_a_part_that_holds_all_layers_can_be_called_directly(arm, ids):
    def by_parts():
        embedded = arm.get_input_embeddings()(ids)
        arm.lm_head(arm.model(inputs_embeds=embedded).last_hidden_state)

    (whole,) = watch_calls(arm, lambda: arm(ids))
    (part,) = watch_calls(arm, lambda: arm.model(ids))
    assert_same(whole, part)
    (embedded,) = watch_calls(arm, by_parts)  # an embedding and a head are not steps
    np.testing.assert_array_equal(whole.received(), embedded.received())


def test_a_forward_that_was_read_before_the_block_is_seen(arm, ids):
    forward = arm.forward
    (expected,) = watch_calls(arm, lambda: arm(ids))
    (trace,) = watch_calls(arm, lambda: forward(ids), lambda: None)
    assert_same(expected, trace)
    (trace,) = watch_calls(arm, lambda: type(arm).forward(arm, ids))
    assert_same(expected, trace)


@pytest.mark.parametrize("part", ["model.layers.1", "model.layers.1.self_attn"])
def test_a_layer_that_is_called_on_its_own_is_refused(arm, ids, part):
    hidden = arm.model.embed_tokens(ids)
    positions = arm.model.rotary_emb(hidden, torch.arange(7)[None])
    message = r"layer 'model\.layers\.1\.self_attn' attends, but neither the model nor a part of it that holds whole"
    with torch.no_grad(), fs.watch(arm), pytest.raises(fs.UserError, match=message):
        arm.get_submodule(part)(hidden, position_embeddings=positions, attention_mask=None)


def test_a_wrapper_that_passes_everything_on_is_read(arm, ids):
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = arm

        def forward(self, *args, **kwargs):
            return self.inner(*args, **kwargs)

    wrapper, padding = Wrapper(), torch.tensor([[0, 0, 1, 1, 1, 1, 1]])
    (expected,) = watch_calls(arm, lambda: arm(ids, padding))
    for call in (lambda: wrapper(ids, padding), lambda: wrapper(input_ids=ids, attention_mask=padding)):
        (trace,) = watch_calls(wrapper, call)
        np.testing.assert_allclose(trace.received(), expected.received(), 1e-5)
        assert trace.arrays["keys"].tolist() == [5]


def test_activation_checkpointing_counts_a_forward_once(ids):
    def train(model):
        model.train()
        model.gradient_checkpointing_enable()
        model(ids, labels=ids, use_cache=False).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    expected, model = train(build_arm()), build_arm()
    with fs.watch(model) as session:
        gradients = train(model)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
    assert [len(trace.arrays["keys"]) for trace in session.traces] == [1]


# ---- what is restored


@pytest.mark.parametrize("build", [build_arm, build_cached])
@pytest.mark.parametrize("fails", [True, False])
def test_every_forward_is_restored(build, fails, ids):
    model = build()
    own = model.h[1].out.forward if isinstance(model, Cached) else model.model.layers[1].forward
    owner = model.h[1].out if isinstance(model, Cached) else model.model.layers[1]
    owner.forward = own  # as accelerate and transformers' tensor parallelism replace it
    before = {name: dict(vars(part)) for name, part in model.named_modules()}
    with torch.no_grad(), fs.watch(model) as session:
        assert any("forward" in vars(part) for part in model.modules() if part is not owner)
        if fails:
            with pytest.raises(IndexError):
                model.forward(ids + 1000)
        if isinstance(model, Cached):
            model.reset()
        model(ids)
    assert [len(trace.arrays["keys"]) for trace in session.traces] == [1]
    for name, part in model.named_modules():
        assert vars(part).keys() == before[name].keys()
    assert vars(owner)["forward"] is own


def test_a_forward_that_is_replaced_inside_the_block_stays_replaced(ids):
    model = build_arm()
    with torch.no_grad(), fs.watch(model) as session:
        inner = model.forward
        model.forward = lambda *args, **kwargs: inner(*args, **kwargs)
        replaced = model.forward
        model(ids)
    assert vars(model)["forward"] is replaced
    with torch.no_grad():
        model(ids)
    assert len(session.traces) == 1


def test_a_watched_model_cannot_be_copied(arm):
    with fs.watch(arm), pytest.raises(fs.UserError, match="cannot be copied or pickled while it is watched"):
        copy.deepcopy(arm)
    assert isinstance(copy.deepcopy(arm), transformers.LlamaForCausalLM)


def test_a_cache_can_be_reordered_after_the_block(arm, ids):
    cache = transformers.DynamicCache()
    with torch.no_grad(), fs.watch(arm):
        arm(ids, past_key_values=cache)
        with pytest.raises(fs.UserError, match="beam search moves sequences"):
            cache.reorder_cache(torch.tensor([0]))
    cache.reorder_cache(torch.tensor([0]))


def test_a_cache_is_not_kept_alive(arm, ids):
    with torch.no_grad(), fs.watch(arm):
        cache = transformers.DynamicCache()
        arm(ids, past_key_values=cache)
        keys = cache.layers[0].keys.untyped_storage()
        del cache
        gc.collect()
        assert not any(
            isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() == keys.data_ptr()
            for x in gc.get_objects()
            if type(x) is torch.Tensor
        )


# ---- sequences


def test_two_caches_are_two_sequences(arm):
    """They have the same length, and their forwards alternate."""
    prompts = [torch.tensor(PROMPT), torch.tensor([[9, 8, 7, 6, 5, 4, 3]])]
    caches = [transformers.DynamicCache() for _ in prompts]

    def step(i, ids):
        return lambda: arm(ids, past_key_values=caches[i])

    calls = [step(0, prompts[0]), step(1, prompts[1]), step(0, torch.tensor([[11]])), step(1, torch.tensor([[12]]))]
    traces = watch_calls(arm, *calls)
    for i, (trace, prompt) in enumerate(zip(traces, prompts, strict=True)):
        tokens = [*prompt[0].tolist(), 11 + i]
        assert trace.arrays["tokens"][-1].tolist() == tokens
        (alone,) = watch_calls(arm, lambda tokens=tokens: arm(torch.tensor([tokens]), use_cache=False))
        np.testing.assert_allclose(trace.received()[-1], alone.received()[0], 1e-3, 1e-5)


def test_a_longer_prompt_with_a_new_cache_is_a_new_sequence(arm):
    """A conversation: its second turn begins with the first, but every row is computed again."""
    first = arm.generate(torch.tensor(PROMPT), max_new_tokens=3, do_sample=False)

    def turn(ids):
        return lambda: arm.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)

    traces = watch_calls(arm, turn(torch.tensor(PROMPT)), turn(first))
    assert [trace.arrays["queries"].tolist() for trace in traces] == [[7, 1, 1], [10, 1, 1]]


def test_rows_that_are_computed_again_over_a_cache_are_not_added_up(arm, ids):
    """A block sampler: the prompt is cached, a block is denoised over it and dropped from the cache after each step."""
    cache, blocks = transformers.DynamicCache(), [torch.tensor([[20, 21, 22]]), torch.tensor([[20, 31, 22]])]

    def step(block):
        def call():
            arm(block, past_key_values=cache)
            cache.crop(-3)

        return call

    (trace,) = watch_calls(arm, lambda: arm(ids, past_key_values=cache), *map(step, blocks))
    assert trace.meta["rows"] == RowSource.ALL
    assert trace.arrays["queries"].tolist() == [7, 3, 3]
    assert trace.arrays["keys"].tolist() == [7, 10, 10]
    for i, block in enumerate(blocks):
        tokens = torch.cat([ids, block], 1)
        assert trace.arrays["tokens"][i + 1].tolist() == tokens[0].tolist()
        (whole,) = watch_calls(arm, lambda tokens=tokens: arm(tokens, use_cache=False), level="full")
        expected = whole.arrays["matrix"][0].mean(1)[:, 7:].mean(1)  # [layer, key]: the rows of the block
        np.testing.assert_allclose(trace.received(layer=None)[i + 1], expected, 1e-3, 1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_a_cache_of_the_models_own_equals_one_forward(seed):
    """Keys grow by the number of tokens at each forward."""
    model = build_cached(seed)
    tokens = torch.randint(3, 50, (2, sum(LENGTHS)))
    parts = tokens.split(LENGTHS, 1)
    traces = watch_calls(model, *(lambda part=part: model(part) for part in parts))
    model.reset()
    whole = watch_calls(model, lambda: model(tokens))
    for trace, expected, row in zip(traces, whole, tokens, strict=True):
        assert trace.meta["rows"] == RowSource.CACHE
        assert trace.arrays["queries"].tolist() == LENGTHS
        assert trace.arrays["tokens"][-1].tolist() == row.tolist()
        assert (trace.arrays["states"][-1] == State.COMMITTED).sum() == sum(LENGTHS[1:])
        np.testing.assert_allclose(trace.received()[-1], expected.received()[0], 1e-3, 1e-5)


def test_sequences_in_caches_of_the_models_own_are_told_apart_by_their_keys():
    """Their forwards alternate, and they have the same lengths; the sampler swaps the caches."""
    model = build_cached()
    tokens = torch.randint(3, 50, (2, 1, sum(LENGTHS)))
    caches: list[list] = [[None, None], [None, None]]

    def run(i, part):
        def call():
            for block, past in zip(model.h, caches[i], strict=True):
                block.past = past
            model(part)
            caches[i] = [block.past for block in model.h]

        return call

    calls = [run(i, tokens[i].split(LENGTHS, 1)[t]) for t in range(len(LENGTHS)) for i in range(2)]
    traces = watch_calls(model, *calls)
    assert [trace.arrays["tokens"][-1].tolist() for trace in traces] == tokens[:, 0].tolist()
    model.reset()
    caches[:] = [[None, None], [None, None]]
    with torch.no_grad(), fs.watch(model):
        model(tokens[0])
        for block in model.h:
            block.past = tuple(x + 1 for x in block.past)
        with pytest.raises(fs.UserError, match=r"the other 8 are not those of the forward before"):
            model(tokens[0, :, :2])


def test_the_same_prompt_denoised_twice_is_two_sequences():
    torch.manual_seed(0)
    model, mask_id = build_arm(), 49

    def denoise():
        tokens = torch.tensor([[5, 6, mask_id, mask_id, mask_id]])
        for step in range(4):  # the first one commits nothing, as Dream's
            model(tokens, use_cache=False)
            tokens = tokens.clone()
            tokens[0, 2 : 2 + step] = 7

    traces = watch_calls(model, denoise, denoise, mask_id=mask_id)
    assert [len(trace.arrays["keys"]) for trace in traces] == [4, 4]
    assert_same(*traces)


def test_keys_from_elsewhere_are_explained(ids):
    model = build_cached()
    with torch.no_grad():
        model(ids)
        message = (
            r"layer 'h\.0' attends over 9 keys in a forward of 2 tokens, and the other 7 are not those of the forward"
            r" before: if they are in a cache of the model's own, begin the `watch` block before .* cross-attention"
        )
        with fs.watch(model), pytest.raises(fs.UserError, match=message):
            model(ids[:, :2])


def test_steps_with_other_layers_are_refused(ids):
    model = build_cached()
    with torch.no_grad(), fs.watch(model):
        model(ids)
        model.reset()
        model.h = model.h[:1]
        with pytest.raises(fs.UserError, match=r"ran 1 attention layers, h\.0 to h\.0, but the one before it ran 2"):
            model(ids)


# ---- DiffusionGemma's generate(), which calls `self.forward` and `self.model.encoder`


def build_diffusion_gemma(seed: int) -> nn.Module:
    text = {
        **{k: v for k, v in SHAPE.items() if v is not None},
        "head_dim": 8,
        "global_head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 64,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = transformers.DiffusionGemmaConfig(text_config=text, vision_config=None, canvas_length=6)
    torch.manual_seed(seed)
    return transformers.DiffusionGemmaForBlockDiffusion(config).eval()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("padded", [False, True])
def test_the_generate_of_diffusion_gemma_is_seen(seed, padded):
    model = build_diffusion_gemma(seed)
    ids = torch.randint(3, 50, (2, 7))
    padding = torch.ones_like(ids)
    if padded:
        padding[1, :3] = 0
    settings = {"attention_mask": padding, "max_new_tokens": 12, "max_denoising_steps": 3}

    def generate():
        torch.manual_seed(seed)
        return model.generate(ids, **settings).sequences

    plain = generate()
    with fs.watch(model, verify=True) as session:
        watched = generate()
    assert torch.equal(watched, plain)
    *encoder, first, second = session.traces
    starts = [0, 3 if padded else 0]
    for b, (trace, start) in enumerate(zip(encoder, starts, strict=True)):
        assert trace.coords["layer"][0] == "model.encoder.language_model.layers.0.self_attn"
        assert trace.meta["rows"] == RowSource.CACHE
        assert trace.arrays["queries"].tolist() == [7 - start, 6]
        assert trace.arrays["tokens"][-1].tolist() == plain[b, start:13].tolist()
    for b, (trace, start) in enumerate(zip((first, second), starts, strict=True)):
        assert trace.coords["layer"][0] == "model.decoder.layers.0.self_attn"
        assert trace.meta["rows"] == RowSource.ALL
        assert trace.arrays["queries"].tolist() == [6] * 6
        assert trace.arrays["keys"].tolist() == [13 - start] * 3 + [19 - start] * 3
        assert trace.arrays["tokens"][3, : 13 - start].tolist() == plain[b, start:13].tolist()
        received = trace.received(layer=None)
        np.testing.assert_allclose(np.nansum(received, -1), 1.0, rtol=1e-4)


# ---- padding in a mask of four dimensions


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("rows", ["blind", "key mask", "causal"])
def test_padding_in_a_four_dimensional_mask_leaves_no_mark(additive, side, rows):
    """Dream hides the rows and the columns of the padding; other samplers hide the columns alone."""
    model = build_arm()
    tokens = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12], [20, 21, 22, 23, 24, 0, 0, 0]])
    valid = tokens != 0
    if side == "left":
        tokens[1], valid[1] = tokens[1].roll(3), valid[1].roll(3)
    mask = valid[:, None, None] & (valid[:, None, :, None] | torch.tensor(rows == "key mask"))
    own = torch.ones(8, 8, dtype=torch.bool)
    if rows == "causal":
        own = own.tril()
    mask = mask & own
    given = torch.where(mask, 0.0, torch.finfo(torch.float32).min) if additive else mask
    positions = (valid.long().cumsum(-1) - 1).clamp_min(0)
    traces = watch_calls(model, lambda: model(tokens, attention_mask=given, position_ids=positions, use_cache=False))
    for b, trace in enumerate(traces):
        alone = tokens[b : b + 1, valid[b]]
        single = own[: alone.shape[1], : alone.shape[1]][None, None]
        (expected,) = watch_calls(model, lambda a=alone, m=single: model(a, attention_mask=m, use_cache=False))
        assert trace.arrays["keys"].tolist() == [alone.shape[1]]
        assert trace.arrays["tokens"].tolist() == alone.tolist()
        np.testing.assert_allclose(trace.received(), expected.received(), 1e-4, 1e-6)
        np.testing.assert_array_equal(trace.arrays["top_key"], expected.arrays["top_key"])


def test_a_dream_like_loop_over_a_padded_batch_equals_its_samples():
    """The mask of four dimensions is given at each step, and positions count from the first token of each sample."""
    model, mask_id = build_arm(), 49
    prompts = [[5, 6, 7, 8, 9], [20, 21]]

    def denoise(tokens, valid):
        given = valid[:, None, None] & valid[:, None, :, None]
        positions = (valid.long().cumsum(-1) - 1).clamp_min(0)
        for _ in range(3):
            logits = model(tokens, attention_mask=given, position_ids=positions, use_cache=False).logits
            logits[..., mask_id] = -torch.inf
            first = (tokens == mask_id).int().argmax(-1)
            tokens = tokens.scatter(1, first[:, None], logits.argmax(-1).gather(1, first[:, None]))

    rows = [[0] * (5 - len(prompt)) + prompt + [mask_id] * 3 for prompt in prompts]
    batch = torch.tensor(rows)
    traces = watch_calls(model, lambda: denoise(batch, batch != 0), mask_id=mask_id)
    assert len(traces) == 2
    for trace, prompt in zip(traces, prompts, strict=True):
        alone = torch.tensor([[*prompt, *[mask_id] * 3]])
        (expected,) = watch_calls(model, lambda a=alone: denoise(a, a != 0), mask_id=mask_id)
        np.testing.assert_array_equal(trace.arrays["states"], expected.arrays["states"])
        np.testing.assert_array_equal(trace.arrays["tokens"], expected.arrays["tokens"])
        np.testing.assert_allclose(trace.received(layer=None), expected.received(layer=None), 1e-4, 1e-6)
