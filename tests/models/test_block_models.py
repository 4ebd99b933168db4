"""Block-causal models and mixtures of experts: their logits equal their definition, and what is missing is named."""

from __future__ import annotations

import json
import weakref
from contextlib import contextmanager

import pytest
import torch
import transformers
from restatements import llada2_logits, llada_moe_logits
from tiny_checkpoints import change_weights, edit_json, read_weights, write_tiny
from transformers import DynamicCache

import floatscope as fs
from floatscope.canvas import CanvasState
from floatscope.models.architectures import find_architecture
from floatscope.models.checkpoint import Checkpoint
from floatscope.models.description import describe
from floatscope.sampling import SAMPLERS
from floatscope.schema import MaskKind, MaskStructure, State
from pairs import every_pair

BLOCK_MODELS = {  # an architecture → the name of its mask, its block size and its shift
    "llada2": ("<|mask|>", 32, False),
    "sdar": ("<|MASK|>", 4, False),
    "sdar-moe": ("<|MASK|>", 4, False),
    "fast-dllm-v2": ("|<MASK>|", 32, True),
}
MIXTURES = ("llada2", "sdar-moe", "llada-moe")
EVERY = (*BLOCK_MODELS, "llada-moe", "a2d")


def read_config(folder):
    return json.loads((folder / "config.json").read_text())


def random_ids(length, seed=0, batch=1):
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(seed))


def build_canvas(*rows):
    """A left-padded batch."""
    length = max(map(len, rows))
    tokens = torch.zeros(len(rows), length, dtype=torch.long)
    states = torch.full((len(rows), length), int(State.PAD))
    for b, row in enumerate(rows):
        tokens[b, length - len(row) :] = torch.as_tensor(row)
        states[b, length - len(row) :] = int(State.PROMPT)
    return CanvasState(tokens, states)


def block_mask(length, size):
    """The rule, pair by pair: [1, 1, query, key]."""
    return torch.tensor([[j // size <= i // size for j in range(length)] for i in range(length)])[None, None]


def assert_close(ours, theirs):
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=0, atol=2e-5 * float(theirs.abs().max()))


# --- logits ----------------------------------------------------------------------------------------------------------


@every_pair(seed=[0, 3], block=[1, 4, 7, 32], kv_heads=[1, 2, 4], length=[9, 13])
def test_llada2_equals_its_definition(tmp_path, seed, block, kv_heads, length):
    folder = write_tiny(tmp_path / "m", "llada2", seed=seed, kv_heads=kv_heads, layers=3)
    model = fs.load(folder, device="cpu", block_size=block)
    ids = random_ids(length, seed)
    theirs = llada2_logits(read_weights(folder), read_config(folder), ids[0], block)
    with torch.no_grad():
        assert_close(model.module(ids).logits[0], theirs)
        assert_close(model.forward(build_canvas(ids[0]))[0], theirs)


def test_llada2_with_one_expert_per_token_does_not_normalise_its_weight(tmp_path):
    folder = write_tiny(tmp_path / "m", "llada2")
    edit_json(folder / "config.json", num_experts_per_tok=1)
    ids = random_ids(9)
    with torch.no_grad():
        ours = fs.load(folder, device="cpu").module(ids).logits[0]
    assert_close(ours, llada2_logits(read_weights(folder), read_config(folder), ids[0], 32))


@pytest.mark.parametrize("seed", [0, 1])
def test_llada_moe_equals_its_definition(tmp_path, seed):
    folder = write_tiny(tmp_path / "m", "llada-moe", seed=seed)
    model = fs.load(folder, device="cpu")
    ids = random_ids(9, seed)
    assert model.spec.visibility == MaskStructure(MaskKind.FULL)
    with torch.no_grad():
        ours = model.forward(build_canvas(ids[0]))[0]
    assert_close(ours, llada_moe_logits(read_weights(folder), read_config(folder), ids[0]))


@every_pair(
    architecture=["sdar", "sdar-moe", "fast-dllm-v2", "a2d"], seed=[0, 2], block=[1, 3, 4, 32], length=[7, 12, 40]
)
def test_a_block_model_is_its_transformers_class_under_an_explicit_mask(tmp_path, architecture, seed, block, length):
    folder = write_tiny(tmp_path / "m", architecture, seed=seed)
    model, ids = fs.load(folder, device="cpu", block_size=block), random_ids(length, seed, batch=2)
    names = {"sdar": "Qwen3", "sdar-moe": "Qwen3Moe", "fast-dllm-v2": "Qwen2", "a2d": "Qwen3"}
    assert type(model.module).__name__ == f"{names[architecture]}ForCausalLM"
    plain = type(model.module)(transformers.AutoConfig.for_model(model.module.config.model_type, **_settings(model)))
    plain.load_state_dict(model.module.state_dict())
    plain.eval().set_attn_implementation("eager")
    mask = block_mask(length, block)
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    with torch.no_grad():
        assert_close(model.module(ids).logits, plain(ids, attention_mask=additive.expand(2, 1, -1, -1)).logits)


def _settings(model):
    return {k: v for k, v in model.module.config.to_dict().items() if k not in ("model_type", "architectures")}


@pytest.mark.parametrize("architecture", BLOCK_MODELS)
def test_later_blocks_do_not_matter_and_the_own_block_does(tmp_path, architecture):
    model = fs.load(write_tiny(tmp_path / "m", architecture), device="cpu", block_size=4)
    ids = random_ids(12)
    later, own = ids.clone(), ids.clone()
    later[0, 8], own[0, 7] = (ids[0, 8] + 1) % 256, (ids[0, 7] + 1) % 256
    with torch.no_grad():
        before, after_later, after_own = (model.module(x).logits for x in (ids, later, own))
    assert_close(after_later[:, :8], before[:, :8])  # an expert with other tokens beside a token rounds differently
    assert_close(after_own[:, :4], before[:, :4])
    assert float((before[:, 4] - after_own[:, 4]).abs().max()) > 0.01


@pytest.mark.parametrize("architecture", BLOCK_MODELS)
def test_blocks_of_a_padded_sample_count_from_its_first_token(tmp_path, architecture):
    model = fs.load(write_tiny(tmp_path / "m", architecture), device="cpu", block_size=4)
    assert model.spec.supports_padding
    long, short = random_ids(14, 1)[0].tolist(), random_ids(9, 2)[0].tolist()
    with torch.no_grad():
        batch = model.forward(build_canvas(long, short))
        assert_close(batch[0], model.forward(build_canvas(long))[0])
        assert_close(batch[1, -9:], model.forward(build_canvas(short))[0])


@pytest.mark.parametrize("architecture", BLOCK_MODELS)
def test_a_cache_of_finished_blocks_leaves_the_logits_as_they_are(tmp_path, architecture):
    model = fs.load(write_tiny(tmp_path / "m", architecture), device="cpu", block_size=4)
    ids, cache = random_ids(14), DynamicCache()
    with torch.no_grad():
        whole = model.module(ids).logits
        parts = [model.module(ids[:, i : i + 4], past_key_values=cache).logits for i in range(0, 14, 4)]
    assert_close(torch.cat(parts, 1), whole)


def test_another_mask_of_the_model_cannot_be_combined_with_blocks(tmp_path):
    model = fs.load(write_tiny(tmp_path / "m", "sdar"), device="cpu")
    packed = torch.tensor([[0, 1, 2, 0, 1, 2]])  # two sequences in one row
    with pytest.raises(fs.UserError, match="block-causal attention cannot be combined with another mask"):
        model.module(random_ids(6), position_ids=packed, use_cache=False)


# --- spec ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", BLOCK_MODELS)
def test_the_spec_of_a_block_model(tmp_path, architecture):
    mask, size, shift = BLOCK_MODELS[architecture]
    folder = write_tiny(tmp_path / "m", architecture)
    model = fs.load(folder, device="cpu")
    spec = model.spec
    assert (spec.paradigm, spec.architecture, spec.shift, spec.block_size) == ("mdm", architecture, shift, size)
    assert spec.visibility == MaskStructure(MaskKind.BLOCK, size)
    assert spec.mask_id == model.tokenizer.token_to_id(mask)
    assert spec.eos_id in spec.stop_ids
    assert model.metadata["block_size"] == size
    assert f"in blocks of {size}" in repr(model)
    description = describe(folder)
    assert (description.spec.block_size, description.capture_obstacle) == (size, None)
    assert description.samplers == tuple(SAMPLERS)


def test_visibility_of_other_models(tmp_path):
    assert fs.load(write_tiny(tmp_path / "m"), device="cpu").spec.visibility == MaskStructure(MaskKind.FULL)
    assert fs.load(write_tiny(tmp_path / "a", "llama"), device="cpu").spec.visibility == MaskStructure(MaskKind.CAUSAL)


def test_every_end_of_text_of_the_config_stops(tmp_path):
    folder = write_tiny(tmp_path / "m", "sdar")
    edit_json(folder / "config.json", eos_token_id=[256, 257, 9999])
    spec = fs.load(folder, device="cpu").spec
    assert (spec.eos_id, spec.other_eos_ids, spec.stop_ids) == (256, (257,), (256, 257))


def test_the_block_size_of_the_config_or_the_published_one(tmp_path):
    folder = write_tiny(tmp_path / "m", "sdar")
    edit_json(folder / "config.json", block_size=16)
    assert fs.load(folder, device="cpu").spec.block_size == 16
    edit_json(folder / "config.json", block_size=None)
    assert fs.load(folder, device="cpu").spec.block_size == 4
    assert any("block_size=" in note for note in describe(folder).warnings)
    assert fs.load(folder, device="cpu", block_size=8).spec.block_size == 8
    assert not any("block_size=" in note for note in describe(folder, block_size=8).warnings)


def test_the_mask_of_the_tokenizer_or_the_published_one(tmp_path):
    folder = write_tiny(tmp_path / "m", "sdar")
    mask = read_config(folder)["mask_token_id"]
    edit_json(folder / "config.json", mask_token_id=None)
    assert fs.load(folder, device="cpu").spec.mask_id == mask
    large = write_tiny(tmp_path / "large", "sdar", vocab_size=151936, width=8, heads=2, kv_heads=2)
    edit_json(large / "config.json", mask_token_id=None)
    for file in large.glob("*token*"):
        file.unlink()
    assert fs.load(large, device="cpu").spec.mask_id == 151669


def test_a2d_attends_in_blocks_if_a_size_is_given(tmp_path):
    folder = write_tiny(tmp_path / "m", "a2d")
    assert fs.load(folder, device="cpu").spec.block_size is None
    assert fs.load(folder, device="cpu", block_size=8).spec.block_size == 8
    assert any("bd3lm" in note for note in describe(folder).warnings)
    edit_json(folder / "config.json", block_size=2)
    assert fs.load(folder, device="cpu").spec.block_size == 2


def test_a_causal_model_with_a_mask_and_a_block_size_is_block_causal(tmp_path):
    folder = write_tiny(tmp_path / "m", "llama")
    model = fs.load(folder, device="cpu", mask_id=261, block_size=4)
    assert model.spec.visibility == MaskStructure(MaskKind.BLOCK, 4)


# --- untrained controls, watching, decoding --------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", EVERY)
def test_the_untrained_control_attends_as_the_model_does(tmp_path, architecture):
    model = fs.load(write_tiny(tmp_path / "m", architecture), device="cpu", block_size=4)
    control, ids = fs.untrained(model, seed=1), random_ids(10)
    other = ids.clone()
    other[0, 4] = (ids[0, 4] + 1) % 256
    with torch.no_grad():
        one, two, trained = (
            module(x).logits for module, x in ((control.module, ids), (control.module, other), (model.module, ids))
        )
    assert_close(two[:, :4], one[:, :4])
    assert not torch.allclose(one, trained)
    bare = fs.untrained(model.module, seed=1)
    with torch.no_grad():
        assert torch.equal(bare(ids).logits, one)


@pytest.mark.parametrize("architecture", EVERY)
def test_a_watched_forward_has_blocks_as_structure(tmp_path, architecture):
    model = fs.load(write_tiny(tmp_path / "m", architecture), device="cpu", block_size=4)
    ids = random_ids(11, batch=2)
    with torch.no_grad():
        plain = model.module(ids).logits
        with fs.watch(model, fields=("received", "uniform"), verify=True) as session:
            watched = model.module(ids).logits
        again = model.module(ids).logits
    assert_close(watched, plain)
    assert torch.equal(again, plain)
    (trace, _) = session.traces
    assert {(mask.kind, mask.size) for mask in trace.masks} == {(MaskKind.BLOCK, 4)}


@pytest.mark.parametrize("architecture", BLOCK_MODELS)
def test_what_decoding_refuses(tmp_path, architecture):
    model = fs.load(write_tiny(tmp_path / "m", architecture), device="cpu")
    with pytest.raises(fs.UserError, match=r"attends in blocks and sees nothing after .*; leave suffix"):
        fs.decode(model, [1, 2, 3], new_tokens=4, suffix=[5])
    for given in ({"new_tokens": 0}, {"infill": True}):
        with pytest.raises(fs.UserError, match=r"fills whole blocks of .*: new_tokens must be at least 1, got 0"):
            fs.decode(model, [1, 2, 3], **given)
    with pytest.raises(fs.UserError, match=r"would cross their borders; leave block out"):
        fs.decode(model, [1, 2, 3], new_tokens=6, block=3)
    with pytest.raises(fs.UserError, match="preset 'dream' is for models that attend to all positions"):
        fs.decode(model, [1, 2, 3], preset="dream")
    with pytest.raises(
        fs.UserError, match=r"120 tokens, with \d+ after it \d+, and .* was trained for 128; shorten it"
    ):
        fs.decode(model, [1] * 120, new_tokens=9)
    with pytest.raises(fs.UserError, match="cannot be cached"):
        fs.load("twin:mdm").cached_forward()


def test_a_changed_attention_is_noticed(tmp_path):
    model = fs.load(write_tiny(tmp_path / "m", "sdar"), device="cpu")
    model.module.set_attn_implementation("sdpa")
    with pytest.raises(fs.UserError, match=r"set_attn_implementation\('block_causal_4'\) restores it"):
        model.forward(build_canvas([1, 2, 3]))
    model.module.set_attn_implementation("block_causal_4")
    model.forward(build_canvas([1, 2, 3]))


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", MIXTURES)
@pytest.mark.parametrize("shards", [1, 3])
def test_experts_are_stored_one_by_one_and_stacked_in_order(tmp_path, architecture, shards):
    folder = write_tiny(tmp_path / "m", architecture, shards=shards)
    stored, module = read_weights(folder), fs.load(folder, device="cpu").module
    experts = module.model.layers[1].mlp.experts
    for expert in range(8):
        gate, up, down = (
            stored[f"model.layers.1.mlp.experts.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down")
        )
        assert torch.equal(experts.gate_up_proj[expert], torch.cat([gate, up]))
        assert torch.equal(experts.down_proj[expert], down)


@pytest.mark.parametrize("architecture", EVERY)
def test_a_module_that_is_written_is_read_back(tmp_path, architecture):
    model = fs.load(write_tiny(tmp_path / "m", architecture), device="cpu")
    extra = {"mask_token_id": model.spec.mask_id}
    folder = fs.write_checkpoint(tmp_path / "copy", fs.untrained(model).module, architecture, extra_config=extra)
    again, ids = fs.load(folder, device="cpu", mask_id=model.spec.mask_id), random_ids(9)
    assert again.spec.block_size == model.spec.block_size
    with torch.no_grad():
        assert torch.equal(again.module(ids).logits, fs.untrained(model).module(ids).logits)


def test_the_fused_projection_of_llada2_is_split_by_rows(tmp_path):
    folder = write_tiny(tmp_path / "m", "llada2")
    fused = read_weights(folder)["model.layers.0.attention.query_key_value.weight"]
    attention = fs.load(folder, device="cpu").module.model.layers[0].self_attn
    parts = [part.weight for part in (attention.q_proj, attention.k_proj, attention.v_proj)]
    assert [len(p) for p in parts] == [32, 16, 16]
    assert torch.equal(torch.cat(parts), fused)


def test_the_router_bias_stays_fp32(tmp_path):
    folder = write_tiny(tmp_path / "m", "llada2")
    stored = read_weights(folder)["model.layers.1.mlp.gate.expert_bias"]
    module = fs.load(folder, device="cpu", dtype="bf16").module
    bias = module.model.layers[1].mlp.gate.e_score_correction_bias
    assert (module.dtype, bias.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(bias, stored)


def test_the_sliding_window_of_llada2_is_ignored(tmp_path):
    folder = write_tiny(tmp_path / "m", "llada2")
    assert read_config(folder)["sliding_window"] == 4096
    ids = random_ids(12)
    with torch.no_grad():
        expected = fs.load(folder, device="cpu").module(ids).logits
        edit_json(folder / "config.json", sliding_window=2)
        assert torch.equal(fs.load(folder, device="cpu").module(ids).logits, expected)


@pytest.mark.parametrize(
    ("architecture", "key"),
    [
        ("llada2", "model.layers.0.attention.query_key_value.weight"),
        ("llada2", "model.layers.1.mlp.experts.5.up_proj.weight"),
        ("llada2", "model.layers.1.mlp.gate.expert_bias"),
        ("sdar-moe", "model.layers.0.mlp.experts.7.down_proj.weight"),
        ("llada-moe", "model.layers.0.mlp.gate.weight"),
        ("fast-dllm-v2", "model.layers.0.self_attn.q_proj.bias"),
    ],
)
def test_missing_and_unexpected_tensors_are_listed(tmp_path, architecture, key):
    folder = write_tiny(tmp_path / "m", architecture)
    change_weights(folder, lambda tensors: tensors.update(surprise=tensors.pop(key)))
    with pytest.raises(fs.UserError) as error:
        fs.load(folder, device="cpu")
    missing, unexpected = str(error.value).split("unexpected tensors")
    assert "missing tensors: " in missing
    assert "surprise" in unexpected
    if "attention.query" not in key and "bias" not in key:
        assert key in missing


def test_a_misshapen_fused_projection_is_named(tmp_path):
    folder, key = write_tiny(tmp_path / "m", "llada2"), "model.layers.0.attention.query_key_value.weight"
    change_weights(folder, lambda tensors: tensors.update({key: tensors[key][:-1].clone()}))
    with pytest.raises(fs.UserError, match=r"unexpected tensors: .*query_key_value"):
        fs.load(folder, device="cpu")


def test_a_misshapen_expert_is_named(tmp_path):
    folder, key = write_tiny(tmp_path / "m", "sdar-moe"), "model.layers.0.mlp.experts.3.up_proj.weight"
    change_weights(folder, lambda tensors: tensors.update({key: tensors[key][:-1].clone()}))
    with pytest.raises(fs.UserError, match=r"its tensor .*experts\.3\.up_proj\.weight is \(23, 32\), but .*\(24, 32\)"):
        fs.load(folder, device="cpu")


def test_more_experts_than_tensors_are_refused_at_once(tmp_path):
    folder = write_tiny(tmp_path / "m", "sdar-moe")
    edit_json(folder / "config.json", num_experts=10**6)
    with pytest.raises(fs.UserError, match="1000000 experts, but there are"):
        fs.load(folder, device="cpu")


class LiveBytes:
    """How many bytes of expert tensors were read and are still alive, outside the module."""

    def __init__(self):
        self.now = self.highest = self.read = 0

    def add(self, tensor):
        self.now, self.read = self.now + tensor.nbytes, self.read + tensor.nbytes
        self.highest = max(self.highest, self.now)
        weakref.finalize(tensor, self.remove, tensor.nbytes)

    def remove(self, count):
        self.now -= count

    @contextmanager
    def count_tensors(self, context):
        with context as tensors:
            yield {key: CountedSlice(t, self) if ".experts." in key else t for key, t in tensors.items()}


class CountedSlice:
    def __init__(self, stored, live):
        self.stored, self.live = stored, live

    def __getitem__(self, index):
        tensor = self.stored[index]
        self.live.add(tensor)
        return tensor

    def __getattr__(self, name):
        return getattr(self.stored, name)


@pytest.mark.parametrize("architecture", MIXTURES)
def test_no_more_than_the_experts_of_one_layer_are_held_while_a_mixture_is_read(tmp_path, monkeypatch, architecture):
    folder, live = write_tiny(tmp_path / "m", architecture, layers=4), LiveBytes()
    opened = Checkpoint.open_tensors
    monkeypatch.setattr(Checkpoint, "open_tensors", lambda self: live.count_tensors(opened(self)))
    fs.load(folder, device="cpu")
    experts = {k: t.nbytes for k, t in read_weights(folder).items() if ".experts." in k}
    layer = sum(size for key, size in experts.items() if key.startswith("model.layers.1."))
    assert live.read == sum(experts.values())
    assert 0 < live.highest <= layer


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({"mask_id": 512}, {}, "mask id 512 is not a valid token id; expected 0 … 511"),
        ({}, {"mask_token_id": 151669}, "mask id 151669 is not a valid token id; expected 0 … 511"),
        ({"block_size": 0}, {}, "block size 0 is not valid; expected a whole number of at least 1"),
        ({"block_size": -4}, {}, "block size -4 is not valid"),
        ({"block_size": True}, {}, "block size True is not valid"),
        ({}, {"block_size": 4.5}, r"block size 4\.5 is not valid"),
        ({}, {"block_size": "4"}, "block size '4' is not valid"),
        ({}, {"block_size": 0}, "block size 0 is not valid"),
        ({}, {"block_size": [4]}, r"block size \[4\] is not valid"),
        ({}, {"attention_bias": True}, "attention_bias True .*another structure than a Qwen3"),
        ({}, {"use_sliding_window": True}, "use_sliding_window True"),
        ({}, {"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        ({}, {"rope_theta": None}, r"its config\.json has no rope_theta"),
    ],
)
def test_bad_settings_of_a_block_model_give_one_sentence(tmp_path, options, changes, message):
    folder = write_tiny(tmp_path / "m", "sdar")
    edit_json(folder / "config.json", **changes)
    for open_model in (lambda: fs.load(folder, device="cpu", **options), lambda: describe(folder, **options)):
        with pytest.raises(fs.UserError, match=message) as error:
            open_model()
        assert "\n" not in str(error.value)


def test_a_mask_that_no_file_names_is_asked_for(tmp_path):
    folder = write_tiny(tmp_path / "m", "llada2", vocab_size=64)  # too small for a tokenizer
    edit_json(folder / "config.json", mask_token_id=None)
    with pytest.raises(
        fs.UserError, match=r"156895, the one of llada2, is outside .* 0 … 63; give its id with mask_id="
    ):
        fs.load(folder, device="cpu")
    assert fs.load(folder, device="cpu", mask_id=63).spec.mask_id == 63


def test_a_bd3lm_without_a_block_size_is_asked_for_it(tmp_path):
    folder = write_tiny(tmp_path / "Qwen3-0.6B-diffusion-bd3lm", "a2d")
    with pytest.raises(fs.UserError, match=r"attends in blocks, .* no block_size; give the size with block_size="):
        fs.load(folder, device="cpu")
    assert fs.load(folder, device="cpu", block_size=32).spec.block_size == 32


def test_blocks_are_for_masked_diffusion_models(tmp_path):
    with pytest.raises(fs.UserError, match="block_size= is for masked diffusion models"):
        fs.load(write_tiny(tmp_path / "m", "llama"), device="cpu", block_size=4)


def test_a_module_without_the_attention_interface_cannot_attend_in_blocks():
    module = torch.nn.Linear(2, 2)
    with pytest.raises(fs.UserError, match="Linear does not use transformers' AttentionInterface"):
        fs.Model(module, fs.ModelSpec("mine", fs.Paradigm.MDM, mask_id=0, block_size=4))


@pytest.mark.parametrize("setting", ["expert_capacity", "delete_token_id", "insert_token_id", "split_token_id"])
def test_llada2_2_is_refused_by_its_settings(tmp_path, setting):
    folder = write_tiny(tmp_path / "m", "llada2")
    edit_json(folder / "config.json", **{setting: 48})
    with pytest.raises(fs.UserError, match=rf"LLaDA2\.2 \(LLaDA2MoeModelLM\) cannot be opened: .* has {setting}"):
        fs.load(folder, device="cpu")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("use_bias", True),
        ("use_qkv_bias", True),
        ("use_qk_norm", False),
        ("norm_head", True),
        ("score_function", "softmax"),
        ("rotary_dim", 8),
        ("use_sliding_window", True),
        ("rope_scaling", {"type": "linear"}),
    ],
)
def test_a_llada2_with_another_structure_is_refused(tmp_path, setting, value):
    folder = write_tiny(tmp_path / "m", "llada2")
    edit_json(folder / "config.json", **{setting: value})
    with pytest.raises(fs.UserError, match=rf"has {setting} .*: this LLaDA2 has another structure than a Glm4Moe"):
        fs.load(folder, device="cpu")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("moe_router_enable_expert_bias", True),
        ("shared_expert_intermediate_size", 64),
        ("moe_router_score_function", "sigmoid"),
        ("clip_qkv", 8),
        ("partial_rotary_factor", 0.5),
        ("qk_layernorm", False),
    ],
)
def test_a_llada_moe_that_is_not_a_qwen3_moe_is_refused_with_the_setting(tmp_path, setting, value):
    folder = write_tiny(tmp_path / "m", "llada-moe")
    edit_json(folder / "config.json", **{setting: value})
    with pytest.raises(fs.UserError, match=rf"has {setting} .*: this LLaDA-MoE has another structure than a Qwen3Moe"):
        fs.load(folder, device="cpu")


def test_dense_layers_of_a_llada_moe(tmp_path):
    folder = write_tiny(tmp_path / "m", "llada-moe", layers=3)
    stored = read_weights(folder)
    dense = {
        k: torch.randn(48, 32) for k in ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight")
    }
    dense["model.layers.0.mlp.down_proj.weight"] = torch.randn(32, 48)

    def replace_experts(tensors):
        for key in [k for k in tensors if k.startswith("model.layers.0.mlp.")]:
            del tensors[key]
        tensors.update(dense)

    change_weights(folder, replace_experts)
    edit_json(folder / "config.json", moe_layer_freq=[0, 1, 1], dense_intermediate_size=48)
    assert stored.keys() != read_weights(folder).keys()
    model, ids = fs.load(folder, device="cpu"), random_ids(7)
    with torch.no_grad():
        ours = model.forward(build_canvas(ids[0]))[0]
    assert_close(ours, llada_moe_logits(read_weights(folder), read_config(folder), ids[0]))


def test_names_of_tensors_decide_too():
    with_experts = ["model.layers.0.mlp.experts.0.up_proj.weight"]
    assert find_architecture({"architectures": ["LLaDA2MoeModelLM"]}, with_experts) is None
    assert (
        find_architecture({"architectures": ["LLaDA2MoeModelLM"]}, ["model.word_embeddings.weight"])[0].name == "llada2"
    )
    assert find_architecture({"architectures": ["LLaDAMoEModelLM"], "model_type": "llada"}, with_experts)[0].name == (
        "llada-moe"
    )
