"""MDLM and BD3-LM: their logits equal their definition, and every part of floatscope that needs a model has one."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from restatements import dit_logits
from tiny_checkpoints import change_weights, edit_json, read_weights, write_tiny
from transformers import DynamicCache

import floatscope as fs
from floatscope.canvas import CanvasState
from floatscope.models.description import describe
from floatscope.schema import MaskKind, MaskStructure, State
from pairs import every_pair

BOTH = ("mdlm", "bd3lm")
MASK = 257


def read_config(folder):
    return json.loads((folder / "config.json").read_text())


def random_ids(length, seed=0, batch=1):
    ids = torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(seed))
    ids[:, length // 2 :: 2] = MASK
    return ids


def build_canvas(*rows):
    """A left-padded batch."""
    length = max(map(len, rows))
    tokens = torch.zeros(len(rows), length, dtype=torch.long)
    states = torch.full((len(rows), length), int(State.PAD))
    for b, row in enumerate(rows):
        tokens[b, length - len(row) :] = torch.as_tensor(row)
        states[b, length - len(row) :] = int(State.PROMPT)
    return CanvasState(tokens, states)


def assert_close(ours, theirs, tolerance=2e-5):
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=0, atol=tolerance * float(theirs.abs().max()))


# --- logits ----------------------------------------------------------------------------------------------------------


@every_pair(
    architecture=list(BOTH), seed=[0, 1, 2], block=[1, 3, 4, 32], length=[1, 7, 12], heads=[1, 2, 4], layers=[1, 3]
)
def test_logits_equal_a_slow_restatement(tmp_path, architecture, seed, block, length, heads, layers):
    folder = write_tiny(tmp_path / "m", architecture, seed=seed, heads=heads, kv_heads=1, layers=layers)
    edit_json(folder / "config.json", block_size=block)
    ids = random_ids(length, seed)
    module, size = fs.load(folder, device="cpu").module, block if architecture == "bd3lm" else None
    expected = dit_logits(read_weights(folder), read_config(folder), ids[0], size)
    with torch.no_grad():
        assert_close(module(ids).logits[0], expected)
        assert_close(module.double()(ids).logits[0], expected, tolerance=1e-12)


def test_the_rows_that_are_kept(tmp_path):
    module, ids = fs.load(write_tiny(tmp_path / "m", "mdlm"), device="cpu").module, random_ids(9)
    with torch.no_grad():
        whole = module(ids).logits
        assert_close(module(ids, logits_to_keep=2).logits, whole[:, 7:])
        assert_close(module(ids, logits_to_keep=slice(3, 5)).logits, whole[:, 3:5])


def test_a_cache_of_finished_blocks_leaves_the_logits_as_they_are(tmp_path):
    module, ids, cache = (
        fs.load(write_tiny(tmp_path / "m", "bd3lm"), device="cpu").module,
        random_ids(14),
        DynamicCache(),
    )
    with torch.no_grad():
        parts = [module(ids[:, i : i + 4], past_key_values=cache).logits for i in range(0, 14, 4)]
        assert_close(torch.cat(parts, 1), module(ids).logits)


@pytest.mark.parametrize("architecture", BOTH)
def test_a_padded_batch_equals_its_samples_alone(tmp_path, architecture):
    model = fs.load(write_tiny(tmp_path / "m", architecture), device="cpu")
    assert model.spec.supports_padding
    long, short = random_ids(14, 1)[0].tolist(), random_ids(9, 2)[0].tolist()
    with torch.no_grad():
        mask = torch.tensor([i != MASK for i in range(model.vocab_size)])
        batch = model.forward(build_canvas(long, short))[..., mask]
        assert_close(batch[0], model.forward(build_canvas(long))[0][:, mask])
        assert_close(batch[1, -9:], model.forward(build_canvas(short))[0][:, mask])


def test_padding_is_noticed_if_the_network_ignores_positions(tmp_path, monkeypatch):
    """The check of an opened model compares its own logits, without the lowest number for the mask."""
    from floatscope.models import dit

    original = dit.Rotation.forward
    monkeypatch.setattr(
        dit.Rotation, "forward", lambda self, p, dtype: original(self, torch.arange(p.shape[1])[None], dtype)
    )
    monkeypatch.setattr(dit, "create_bidirectional_mask", lambda *_, **__: None)
    assert not fs.load(write_tiny(tmp_path / "m", "mdlm"), device="cpu").spec.supports_padding


def test_in_bf16_the_frequencies_stay_fp32(tmp_path):
    folder = write_tiny(tmp_path / "m", "mdlm")
    module = fs.load(folder, device="cpu", dtype="bf16").module
    assert module.dtype == torch.bfloat16
    assert torch.equal(module.backbone.rotary_emb.inv_freq, read_weights(folder)["backbone.rotary_emb.inv_freq"])
    exact = fs.load(folder, device="cpu").module
    with torch.no_grad():
        assert_close(module(random_ids(12)).logits, exact(random_ids(12)).logits, tolerance=0.1)


# --- spec and files --------------------------------------------------------------------------------------------------


def test_the_spec(tmp_path):
    mdlm, bd3lm = (fs.load(write_tiny(tmp_path / name, name), device="cpu") for name in BOTH)
    for model in (mdlm, bd3lm):
        assert (model.spec.paradigm, model.spec.shift, model.spec.mask_id, model.spec.context) == (
            "mdm",
            False,
            MASK,
            128,
        )
        assert model.spec.excludes_mask
    assert mdlm.spec.visibility == MaskStructure(MaskKind.FULL)
    assert bd3lm.spec.visibility == MaskStructure(MaskKind.BLOCK, 4)
    assert describe(tmp_path / "mdlm").capture_obstacle is None
    assert "confidence" in describe(tmp_path / "mdlm").samplers


def test_the_sizes_and_the_files_of_the_published_checkpoints(tmp_path):
    """No tokenizer, no mask in the config, 50258 tokens: the mask is the one after GPT-2's."""
    folder = write_tiny(tmp_path / "m", "mdlm", vocab_size=50258, width=8, heads=2)
    ids = {"mask_token_id": None, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    edit_json(folder / "config.json", **ids)
    for file in folder.glob("*token*"):
        file.unlink()
    model = fs.load(folder, device="cpu")
    assert (model.spec.mask_id, model.spec.eos_id, model.tokenizer) == (50257, None, None)
    assert len(fs.decode(model, [1, 2, 3], new_tokens=4).generated_ids[0]) == 4
    assert any("copy the files of its tokenizer" in note for note in describe(folder).warnings)
    with pytest.raises(fs.UserError, match="has no tokenizer"):
        fs.decode(model, "What floats?", new_tokens=4)


def test_a_tokenizer_without_the_mask_can_be_copied_into_the_folder(tmp_path):
    folder, other = write_tiny(tmp_path / "m", "mdlm"), write_tiny(tmp_path / "gpt2", "llama")
    for file in folder.glob("*token*"):
        file.unlink()
    for file in other.glob("*token*"):
        shutil.copy(file, folder)
    edit_json(folder / "config.json", mask_token_id=511)
    model = fs.load(folder, device="cpu")
    assert (model.spec.mask_id, model.tokenizer.id_to_token(511)) == (511, None)
    assert len(fs.decode(model, "What floats?", new_tokens=4, watch=fs.Watch()).trace.tokens) == 4


@pytest.mark.parametrize("architecture", BOTH)
@pytest.mark.parametrize("shards", [1, 3])
def test_a_module_that_is_written_is_read_back(tmp_path, architecture, shards):
    folder = write_tiny(tmp_path / "m", architecture)
    model, ids = fs.load(folder, device="cpu"), random_ids(9)
    extra = {"mask_token_id": MASK}
    copy = fs.write_checkpoint(tmp_path / "copy", model.module, architecture, extra_config=extra, shards=shards)
    again = fs.load(copy, device="cpu")
    assert read_weights(copy).keys() == read_weights(folder).keys()
    assert again.spec.block_size == model.spec.block_size
    written, read = model.module.state_dict(), again.module.state_dict()
    assert written.keys() == read.keys()
    assert all(torch.equal(written[name], read[name]) for name in written)
    with torch.no_grad():
        assert_close(again.module(ids).logits, model.module(ids).logits)  # kernels round by the address of a weight


def test_the_official_tensor_names(tmp_path):
    block = ("adaLN_modulation.bias", "adaLN_modulation.weight", "attn_out.weight", "attn_qkv.weight", "mlp.0.bias")
    block += ("mlp.0.weight", "mlp.2.bias", "mlp.2.weight", "norm1.weight", "norm2.weight")
    readout = ("adaLN_modulation.bias", "adaLN_modulation.weight", "linear.bias", "linear.weight", "norm_final.weight")
    names = {"rotary_emb.inv_freq", "vocab_embed.embedding"}
    names |= {f"sigma_map.mlp.{i}.{part}" for i in (0, 2) for part in ("weight", "bias")}
    names |= {f"blocks.{i}.{part}" for i in (0, 1) for part in block} | {f"output_layer.{part}" for part in readout}
    names = {f"backbone.{name}" for name in names}
    assert read_weights(write_tiny(tmp_path / "m", "mdlm")).keys() == names
    assert read_weights(write_tiny(tmp_path / "b", "bd3lm")).keys() == names | {"sampling_eps_min", "sampling_eps_max"}


@pytest.mark.parametrize("architecture", BOTH)
@pytest.mark.parametrize(
    "key", ["blocks.1.attn_qkv.weight", "vocab_embed.embedding", "rotary_emb.inv_freq", "sigma_map.mlp.2.bias"]
)
def test_missing_and_unexpected_tensors_are_listed(tmp_path, architecture, key):
    folder = write_tiny(tmp_path / "m", architecture)
    change_weights(folder, lambda tensors: tensors.update(surprise=tensors.pop(f"backbone.{key}")))
    with pytest.raises(fs.UserError) as error:
        fs.load(folder, device="cpu")
    missing, unexpected = str(error.value).split("unexpected tensors")
    assert f"missing tensors: backbone.{key.replace('embedding', 'weight')}" in missing
    assert "surprise" in unexpected


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("mdlm", {"cond_dim": None}, r"config\.json has no cond_dim"),
        ("mdlm", {"n_heads": None, "hidden_dim": None}, r"config\.json has no hidden_dim, n_heads"),
        (
            "bd3lm",
            {"block_size": None},
            r"it attends in blocks, and its config\.json has no block_size; give the size with",
        ),
        ("bd3lm", {"block_size": 0}, "block size 0 is not valid"),
        (
            "mdlm",
            {"vocab_size": 511},
            r"its tensor backbone\.\S+ is \(512(, 32)?,?\), but its config\.json needs \(511",
        ),
        (
            "bd3lm",
            {"vocab_size": 513},
            r"its tensor backbone\.\S+ is \(512(, 32)?,?\), but its config\.json needs \(513",
        ),
        ("mdlm", {"time_conditioning": True}, "time_conditioning true: its logits depend on the noise level"),
        ("bd3lm", {"time_conditioning": True}, "time_conditioning true: its logits depend on the noise level"),
        ("bd3lm", {"adaln": False}, r"adaln False \(expected True\): this BD3-LM has another structure"),
        ("bd3lm", {"cross_attn": False}, r"cross_attn False \(expected True\)"),
        ("mdlm", {"n_heads": 5}, "hidden_dim 32 is not an even multiple of n_heads 5"),
        ("mdlm", {"n_heads": 32}, "hidden_dim 32 is not an even multiple of n_heads 32"),
        ("mdlm", {"n_heads": 0}, "must be at least 1"),
        ("mdlm", {"hidden_dim": "32"}, "does not describe a DiTForMaskedLM"),
        ("mdlm", {"mask_token_id": None}, r"mask token was not found in .*give its id with mask_id="),
        ("mdlm", {"mask_token_id": 512}, "mask id 512 is not a valid token id"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_with_the_reason(tmp_path, architecture, changes, message):
    folder = write_tiny(tmp_path / "m", architecture)
    edit_json(folder / "config.json", **changes)
    with pytest.raises(fs.UserError, match=message):
        fs.load(folder, device="cpu")


# --- decoding, watching, controls ------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", ["confidence", "entropy", "random", "origin"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_decoded_batch_equals_its_samples_alone(tmp_path, sampler, temperature):
    model = fs.load(write_tiny(tmp_path / "m", "mdlm"), device="cpu")
    prompts, names = [random_ids(9, 3)[0, :4].tolist(), random_ids(14, 4)[0, :7].tolist()], ["a", "b"]
    settings = {"sampler": sampler, "temperature": temperature, "new_tokens": 6, "steps": 6}
    batch = fs.decode(model, prompts, samples=names, **settings)
    alone = [fs.decode(model, [p], samples=[n], **settings) for p, n in zip(prompts, names, strict=True)]
    assert batch.generated_ids == [one.generated_ids[0] for one in alone]


@pytest.mark.parametrize("settings", [{}, {"guidance": 1.5}, {"temperature": 1.0}, {"sampler": "margin", "top_p": 0.9}])
def test_the_mask_is_never_committed_and_commits_stay(tmp_path, settings):
    folder = write_tiny(tmp_path / "m", "mdlm")
    key = "backbone.output_layer.linear.bias"
    change_weights(folder, lambda tensors: tensors[key].index_fill_(0, torch.tensor([MASK]), 1000.0))
    model = fs.load(folder, device="cpu")
    with torch.no_grad():
        assert int(model.module(random_ids(6)).logits[0, 0].argmax()) == MASK  # the network's own logits are unchanged
        logits = model.forward(build_canvas([1, 2, 3]))
    assert float(logits.softmax(-1)[..., MASK].max()) == 0
    steps = list(fs.decode(model, [1, 2, 3], new_tokens=8, steps=4, **settings))
    for step in steps:
        was_committed = ~step.before.masked
        assert torch.equal(step.after.tokens[was_committed], step.before.tokens[was_committed])
        assert int(step.after.masked.sum()) == int(step.before.masked.sum()) - 2
    assert not bool(steps[-1].after.masked.any())


@pytest.mark.parametrize("architecture", BOTH)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_watched_forward_is_exact_and_leaves_the_logits(tmp_path, architecture, seed):
    model, ids = (
        fs.load(write_tiny(tmp_path / "m", architecture, seed=seed), device="cpu"),
        random_ids(11, seed, batch=2),
    )
    with torch.no_grad():
        plain = model.module(ids).logits
        with fs.watch(model, verify=True) as session:
            watched = model.module(ids).logits
        again = model.module(ids).logits
    assert_close(watched, plain)
    assert torch.equal(again, plain)
    kind = {"mdlm": (MaskKind.FULL, 0), "bd3lm": (MaskKind.BLOCK, 4)}[architecture]
    assert {(mask.kind, mask.size) for mask in session.traces[0].masks} == {kind}


def test_a_watched_decoding_equals_a_plain_one(tmp_path):
    model = fs.load(write_tiny(tmp_path / "m", "mdlm"), device="cpu")
    out = fs.decode(model, ["What floats?", "Hi"], new_tokens=4, watch=fs.Watch(verify=True))
    plain = fs.decode(model, ["What floats?", "Hi"], new_tokens=4)
    assert out.generated_ids == plain.generated_ids
    assert {trace.meta["architecture"] for trace in out.traces} == {"mdlm"}
    hidden = fs.decode(model, "What floats?", new_tokens=4, edits="mask_anchors(k=2)", watch=fs.Watch(verify=True))
    assert len(hidden.trace.tokens) == 4


def test_a_run_folder(tmp_path):
    model = fs.load(write_tiny(tmp_path / "m", "mdlm"), device="cpu")
    run = fs.trace(model, ["What floats?", "What sinks?"], tmp_path / "run", new_tokens=4)
    assert [len(trace.tokens) for trace in run] == [4, 4]


@pytest.mark.parametrize("architecture", BOTH)
def test_the_untrained_control_reads_its_context(tmp_path, architecture):
    """The authors' initial network has closed gates and predicts all tokens alike."""
    model, ids = fs.load(write_tiny(tmp_path / "m", architecture), device="cpu"), random_ids(10)
    control, other = fs.untrained(model, seed=1), ids.clone()
    other[0, 5] = (ids[0, 5] + 1) % 256
    with torch.no_grad():
        one, two, trained = control.module(ids).logits, control.module(other).logits, model.module(ids).logits
        assert torch.equal(fs.untrained(model.module, seed=1)(ids).logits, one)
    assert not torch.allclose(one, trained)
    assert float((one[0, 4] - two[0, 4]).abs().max()) > 1e-6
    assert float((one[0, 0] - two[0, 0]).abs().max() > 1e-7) == (architecture == "mdlm")
    gates = control.module.backbone.blocks[0].adaLN_modulation.bias.view(6, -1)[[2, 5]]
    assert torch.equal(gates, torch.ones_like(gates))


def test_bd3lm_decodes_in_blocks_and_a_batch_as_its_samples_alone(tmp_path):
    model = fs.load(write_tiny(tmp_path / "m", "bd3lm"), device="cpu")
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9]]
    batch = fs.decode(model, prompts, new_tokens=6)
    assert batch.generated_ids == [fs.decode(model, [prompt], new_tokens=6).generated_ids[0] for prompt in prompts]
    assert all(model.spec.mask_id not in ids for ids in batch.generated_ids)


def test_a_bd3lm_whose_config_names_no_block_opens_with_a_given_one(tmp_path):
    folder = write_tiny(tmp_path / "m", "bd3lm")
    edit_json(folder / "config.json", block_size=None)
    assert fs.load(folder, device="cpu", block_size=8).spec.block_size == 8
    assert describe(folder, block_size=2).spec.block_size == 2
