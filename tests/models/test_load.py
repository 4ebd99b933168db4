"""`fs.load`: what comes out is the network that was written, and what cannot be right is refused in one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
import transformers
from folders import LAYOUTS, TINY, edit, spoil, tiny, weights
from safetensors.torch import load_file, save_file

import floatscope as fs
from floatscope.models import place
from floatscope.models.families import llama_key


def by_hand(folder: Path, layout: str) -> torch.nn.Module:
    """The same network built without the loader: config and keys written out."""
    config = json.loads((folder / "config.json").read_text())
    sizes = {
        "hidden_size": TINY["width"],
        "num_hidden_layers": TINY["layers"],
        "num_attention_heads": TINY["heads"],
        "num_key_value_heads": TINY["kv_heads"],
        "intermediate_size": TINY["ffn"],
        "vocab_size": 512,
        "tie_word_embeddings": False,
    }
    if layout == "llada":
        rope = {"rope_type": "default", "rope_theta": config["rope_theta"]}
        made = transformers.LlamaConfig(**sizes, rms_norm_eps=1e-5, rope_parameters=rope)
        module = transformers.LlamaForCausalLM(made)
        state = {llama_key(k): t for k, t in weights(folder).items()}
    else:
        rope = {"rope_type": "default", "rope_theta": config["rope_theta"]}
        made = transformers.Qwen2Config(**sizes, rms_norm_eps=1e-6, rope_parameters=rope)
        module, state = transformers.Qwen2ForCausalLM(made), weights(folder)
    module.load_state_dict(state)
    return module.eval()


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.parametrize("layout", ["llada", "dream"])
def test_an_opened_folder_is_the_network_built_by_hand(tmp_path, layout, seed, shards):
    folder = tiny(tmp_path / "m", layout, seed=seed, shards=shards)
    model = fs.load(folder, device="cpu")
    ids = torch.randint(0, 256, (2, 13))
    with torch.no_grad():
        ours = model.module(ids, is_causal=False, use_cache=False).logits
        theirs = by_hand(folder, layout)(ids, is_causal=False, use_cache=False).logits
    assert torch.equal(ours, theirs)
    assert not model.module.training
    assert model.spec.shift is (layout == "dream")
    assert model.spec.context == (128 if layout == "llada" else 2048)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_change_nothing(tmp_path, layout):
    one, four = (fs.load(tiny(tmp_path / str(n), layout, shards=n), device="cpu") for n in (1, 4))
    assert len(list((tmp_path / "4").glob("*.safetensors"))) == 4
    for key, tensor in one.module.state_dict().items():
        assert torch.equal(four.module.state_dict()[key], tensor)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_spec_says_what_the_files_say(tmp_path, layout):
    model = fs.load(tiny(tmp_path / "a name", layout), device="cpu")
    spec, text = model.spec, model.tokenizer
    assert spec.name == "a name"
    assert spec.paradigm == ("arm" if layout == "llama" else "mdm")
    assert spec.architecture == {"llama": "causal"}.get(layout, layout)
    mask = {"llada": "<|mdm_mask|>", "dream": "<|mask|>", "llama": None, "bert": "[MASK]"}[layout]
    assert text.name_of(spec.mask_id) == mask
    ends = {"llada": "<|endoftext|>", "dream": "<|endoftext|>", "llama": "<|im_end|>", "bert": "[SEP]"}
    assert text.name_of(spec.eos_id) == ends[layout]
    turns = {"llada": "<|eot_id|>", "dream": "<|im_end|>"}
    assert text.name_of(spec.eot_id) == turns.get(layout)
    assert len(spec.weights) == 64
    assert not spec.remote_code


def test_llada_leaves_its_mask_to_the_config(tmp_path):
    folder = tiny(tmp_path / "m")
    edit(folder / "config.json", mask_token_id=None)
    with pytest.raises(
        fs.UserError, match=r"mask token is not where it should be \(config\.json\); say its id with mask_id="
    ):
        fs.load(folder, device="cpu")
    assert fs.load(folder, device="cpu", mask_id=300).spec.mask_id == 300


@pytest.mark.parametrize("bad", [-1, 512, 10**9])
def test_a_mask_id_out_of_range_is_refused_wherever_it_comes_from(tmp_path, bad):
    folder = tiny(tmp_path / "m")
    said = rf"mask id {bad} is none of its token ids, 0 … 511"
    with pytest.raises(fs.UserError, match=said):
        fs.load(folder, device="cpu", mask_id=bad)
    edit(folder / "config.json", mask_token_id=bad)
    with pytest.raises(fs.UserError, match=said):
        fs.load(folder, device="cpu")


def test_a_mask_id_that_is_no_number_is_refused(tmp_path):
    folder = tiny(tmp_path / "m")
    edit(folder / "config.json", mask_token_id=True)
    with pytest.raises(fs.UserError, match="mask id True is none of its token ids"):
        fs.load(folder, device="cpu")


def test_shift_is_overruled(tmp_path):
    assert fs.load(tiny(tmp_path / "m"), device="cpu", shift=True).spec.shift is True
    assert fs.load(tiny(tmp_path / "d", "dream"), device="cpu", shift=False).spec.shift is False


def test_a_causal_model_with_a_mask_id_denoises(tmp_path):
    model = fs.load(tiny(tmp_path / "m", "llama"), device="cpu", mask_id=300)
    assert (model.spec.paradigm, model.spec.shift, model.spec.mask_id) == ("mdm", True, 300)


def test_a_causal_model_that_keeps_its_mask_cannot_denoise(tmp_path, monkeypatch):
    folder = tiny(tmp_path / "m", "llama")
    forward = transformers.LlamaForCausalLM.forward

    def stubborn(self, *args, is_causal=None, **kwargs):
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", stubborn)
    with pytest.raises(fs.UserError, match=r"m \(LlamaForCausalLM\) keeps its causal mask .*, so it cannot denoise"):
        fs.load(folder, device="cpu", mask_id=300)


# --- strictness ------------------------------------------------------------------------------------------------------

SOME = {
    "llada": ("model.transformer.ln_f.weight", "model.norm.weight"),
    "dream": ("model.layers.1.self_attn.k_proj.bias",) * 2,
    "llama": ("model.layers.0.mlp.up_proj.weight",) * 2,
    "bert": ("bert.encoder.layer.1.output.dense.bias",) * 2,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_missing_tensors_are_listed(tmp_path, layout):
    folder, (key, shown) = tiny(tmp_path / "m", layout), SOME[layout]
    spoil(folder, lambda tensors: tensors.pop(key))
    with pytest.raises(fs.UserError) as error:
        fs.load(folder, device="cpu")
    assert str(error.value) == f"{folder}: missing tensors: {shown}; unexpected tensors: none"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_unexpected_tensors_are_listed(tmp_path, layout):
    folder = tiny(tmp_path / "m", layout)
    spoil(folder, lambda tensors: tensors.update({"model.layers.9.extra.weight": torch.zeros(3)}))
    with pytest.raises(fs.UserError) as error:
        fs.load(folder, device="cpu")
    assert str(error.value) == f"{folder}: missing tensors: none; unexpected tensors: model.layers.9.extra.weight"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_of_another_shape_is_named(tmp_path, layout):
    folder, (key, shown) = tiny(tmp_path / "m", layout), SOME[layout]
    size = weights(folder)[key].shape[0]
    # as many numbers as before elsewhere, so that only the shape is wrong
    spoil(folder, lambda t: t.update({key: torch.zeros(size + 1, *t[key].shape[1:])}))
    with pytest.raises(
        fs.UserError, match=rf"its tensor {shown} is \({size + 1}.*, and its config\.json asks for \({size}"
    ):
        fs.load(folder, device="cpu")


def test_missing_tensors_are_seen_before_any_weight_is_read(tmp_path, monkeypatch):
    folder = tiny(tmp_path / "m")
    spoil(folder, lambda tensors: tensors.pop("model.transformer.ln_f.weight"))
    monkeypatch.setattr(
        transformers.LlamaForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("weights were read")
    )
    with pytest.raises(fs.UserError, match=r"missing tensors: model\.norm\.weight"):
        fs.load(folder, device="cpu")


def test_tied_heads_are_tied_and_may_be_left_out(tmp_path):
    config = transformers.Qwen3Config(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    module = transformers.Qwen3ForCausalLM(config)
    module.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    model = fs.load(tmp_path, device="cpu")
    assert model.module.lm_head.weight is model.module.model.embed_tokens.weight
    ids = torch.randint(0, 300, (1, 7))
    with torch.no_grad():
        assert torch.equal(model.module(ids).logits, module.eval()(ids).logits)


def test_a2d_is_its_base_model_read_both_ways(tmp_path):
    """dllm's Qwen3: the same weights and keys under another name, its mask by name in the tokenizer."""
    source = tiny(tmp_path / "tokens", "dream")
    config = transformers.Qwen3Config(
        vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    module = transformers.Qwen3ForCausalLM(config).eval()
    folder = fs.write_checkpoint(tmp_path / "a2d", module, tokenizer=fs.load(source, device="cpu").tokenizer.tokenizer)
    edit(folder / "config.json", architectures=["A2DQwen3LMHeadModel"], model_type="a2d-qwen3")
    model = fs.load(folder, device="cpu")
    assert (model.spec.architecture, model.spec.paradigm, model.spec.shift) == ("a2d", "mdm", False)
    assert model.module.config.model_type == "qwen3"
    assert model.tokenizer.name_of(model.spec.mask_id) == "<|mask|>"
    ids = torch.randint(0, 300, (1, 7))
    with torch.no_grad():
        assert torch.equal(model.module(ids, is_causal=False).logits, module(ids, is_causal=False).logits)


def test_an_illada_folder_opens_with_mask_5(tmp_path):
    folder = tiny(tmp_path / "m", "llama")
    edit(folder / "config.json", architectures=["iLLaDAModelLM"], rope_theta=500000.0)
    model = fs.load(folder, device="cpu")
    assert (model.spec.architecture, model.spec.paradigm, model.spec.mask_id, model.spec.shift) == (
        "illada",
        "mdm",
        5,
        False,
    )


# --- where and in which precision ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bf16", "bfloat16", torch.bfloat16])
def test_weights_come_in_the_dtype_asked_for_and_rotation_stays_fp32(tmp_path, name):
    model = fs.load(tiny(tmp_path / "m"), device="cpu", dtype=name)
    assert model.dtype == torch.bfloat16
    assert {p.dtype for p in model.module.parameters()} == {torch.bfloat16}
    frequencies = model.module.model.rotary_emb.inv_freq
    assert frequencies.dtype == torch.float32
    exact = 1 / 500000.0 ** (torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(frequencies, exact)
    full = fs.load(tmp_path / "m", device="cpu").module.state_dict()
    assert all(torch.equal(t, full[k].bfloat16()) for k, t in model.module.state_dict().items())


def test_half_precision_files_open_in_float32_on_a_cpu(tmp_path):
    folder = tiny(tmp_path / "m")
    spoil(folder, lambda tensors: tensors.update({k: t.bfloat16() for k, t in tensors.items()}))
    assert fs.load(folder, device="cpu").dtype == torch.float32


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"device": "cuda"}, "cuda was asked for, and there is no GPU here; device='cpu' works"),
        ({"device": "cuda:3"}, "cuda:3 was asked for, and there is no GPU here; device='cpu' works"),
        ({"device": "auto"}, "device='auto' spreads a model over GPUs, and there is none here; device='cpu' works"),
        ({"device": "gpu"}, "unknown device 'gpu'; allowed: cpu, cuda, cuda:0 …, mps, auto"),
        ({"device": "meta"}, "unknown device 'meta'; allowed: cpu, cuda, cuda:0 …, mps, auto"),
        ({"dtype": "bfloat"}, "unknown dtype 'bfloat' (did you mean 'bfloat16'?); allowed: float32, fp32, bfloat16,"),
        ({"dtype": torch.int8}, "unknown dtype 'int8'"),
        ({"revision": "main"}, "revision='main' belongs to a hub id, and "),
    ],
)
def test_what_is_not_here_is_said(tmp_path, monkeypatch, given, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(fs.UserError) as error:
        fs.load(tiny(tmp_path / "m"), **given)
    assert str(error.value).startswith(said)


def test_too_little_memory_is_said_before_loading(tmp_path, monkeypatch):
    folder = tiny(tmp_path / "m", width=256, ffn=1024, vocabulary=2048)
    count = sum(t.numel() for t in weights(folder).values())
    for free, helps in (
        (count * 3, rf"dtype='bfloat16' needs {count * 2 / 2**30:.1f} GiB"),
        (count, "it takes a larger device"),
    ):
        monkeypatch.setattr(place, "free_bytes", lambda where, free=free: free)
        with pytest.raises(fs.UserError, match=rf"m needs .* GiB on cpu in float32, and .* GiB are free; {helps}"):
            fs.load(folder, device="cpu")
    monkeypatch.setattr(place, "free_bytes", lambda where: count * 3)
    assert fs.load(folder, device="cpu", dtype="bf16").dtype == torch.bfloat16


def test_free_memory_of_a_cpu_is_told():
    assert place.free_bytes(torch.device("cpu")) > 2**20


def test_running_out_of_memory_while_loading_is_said_too(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(transformers.LlamaForCausalLM, "from_pretrained", full)
    with pytest.raises(fs.UserError, match=r"m needs 0\.0 GiB on cpu in float32, and .* GiB are free"):
        fs.load(tiny(tmp_path / "m"), device="cpu")


Peak = namedtuple("Peak", "model shard above")
MEASURE = """
import re, sys, threading, time, torch
torch.set_num_threads(1)
import floatscope as fs
def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
fs.load(sys.argv[1], device="cpu")  # whatever is imported and cached once
highest, stop = 0, False
def watch():
    global highest
    while not stop:
        highest = max(highest, anonymous())
        time.sleep(0.0005)
before = anonymous()
thread = threading.Thread(target=watch); thread.start()
model = fs.load(sys.argv[2], device="cpu", dtype=sys.argv[3])
stop = True; thread.join()
print(highest - before, sum(p.numel() * p.element_size() for p in model.module.parameters()))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    ("stored", "asked"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("float32", "float32")]
)
def test_the_peak_of_host_memory_is_the_model_and_about_a_shard(tmp_path, stored, asked):
    shape = {"layers": 4, "width": 512, "heads": 8, "kv_heads": 8, "ffn": 2048, "vocabulary": 8192}
    folder = fs.write_random(tmp_path / "large", shards=4, **shape)
    for file in folder.glob("*.safetensors"):
        save_file({k: t.to(getattr(torch, stored)) for k, t in load_file(file).items()}, file)
    command = [sys.executable, "-c", MEASURE, str(tiny(tmp_path / "m")), str(folder), asked]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    grown, model = map(int, done.stdout.split())
    shard = max(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert grown <= model + 1.2 * shard, (
        f"{grown / 2**20:.0f} MiB for {model / 2**20:.0f} and a shard of {shard / 2**20:.0f}"
    )


# --- names -----------------------------------------------------------------------------------------------------------


def test_a_name_that_leads_nowhere_is_refused(tmp_path):
    with pytest.raises(fs.UserError, match=r"nowhere is no folder; give a checkpoint folder, a hub id \(org/name\)"):
        fs.load(tmp_path / "nowhere")


def test_an_unknown_twin_is_refused_with_the_shipped_ones():
    said = r"unknown twin 'mdn' \(did you mean 'mdm'\?\); allowed: arm, mdm, mdm-adapted"
    with pytest.raises(fs.UserError, match=said):
        fs.load("twin:mdn")


def test_an_unknown_architecture_is_refused_and_its_code_not_run(tmp_path):
    folder = tiny(tmp_path / "m", "llama")
    (folder / "modeling_evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    edit(folder / "config.json", architectures=["EvilModel"], auto_map={"AutoModel": "modeling_evil.EvilModel"})
    said = r"unknown architecture EvilModel .*; it brings code of its own, which runs only with trust_remote_code=True"
    with pytest.raises(fs.UserError, match=said):
        fs.load(folder, device="cpu")
    assert not (tmp_path / "ran").exists()


def test_code_of_a_checkpoint_runs_when_the_user_says_so_and_the_spec_tells(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tiny(tmp_path / "own_code", "llama")
    code = "from transformers import LlamaForCausalLM\nclass OwnModel(LlamaForCausalLM):\n    pass\n"
    (folder / "modeling_own.py").write_text(code)
    edit(folder / "config.json", architectures=["OwnModel"], auto_map={"AutoModelForCausalLM": "modeling_own.OwnModel"})
    model = fs.load(folder, device="cpu", trust_remote_code=True)
    assert type(model.module).__name__ == "OwnModel"
    assert (model.spec.remote_code, model.spec.paradigm, model.spec.architecture) == (True, "arm", "remote")
    plain = fs.load(tiny(tmp_path / "plain", "llama"), device="cpu", trust_remote_code=True)
    assert plain.spec.remote_code is False  # a row of the table opens it, so there was nothing to run


def test_a_name_may_begin_with_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    tiny(tmp_path / "m")
    assert fs.load("~/m", device="cpu").spec.name == "m"


def test_loading_says_nothing(tmp_path, capfd):
    fs.load(tiny(tmp_path / "m"), device="cpu")
    assert capfd.readouterr() == ("", "")


NAMES = """
import floatscope as fs
from floatscope.models.describe import describe
for name in ("~nobody-here/x", "a\\0b", "x" * 5000, None, 5, b"abc", [], ""):
    for act in (fs.load, describe):
        try:
            act(name)
        except fs.UserError as error:
            assert str(error).isprintable() and len(str(error)) < 6000, name
            print(str(error)[:60])
"""


def test_what_is_no_name_is_one_sentence():
    """In a process without the tests' type checks."""
    done = subprocess.run([sys.executable, "-c", NAMES], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 16


@pytest.mark.parametrize("shift", [True, False])
def test_shift_means_nothing_to_an_autoregressive_model(tmp_path, shift):
    with pytest.raises(fs.UserError, match="shift= is for masked diffusion models, and this one is autoregressive"):
        fs.load(tiny(tmp_path / "m", "llama"), device="cpu", shift=shift)


def test_a_model_is_shown_in_a_line(tmp_path):
    model = fs.load(tiny(tmp_path / "m"), device="cpu")
    parameters = sum(p.numel() for p in model.module.parameters())
    assert repr(model) == f"Model(m: masked diffusion, 2 layers, {parameters:,} parameters, float32 on cpu)"


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        (
            "evil/repo--modeling_x.X",
            "asks for code that is not in its folder (evil/repo--modeling_x.X), which is not run",
        ),
        (5, "asks for code that is not in its folder (5), which is not run"),
        ("missing_file.X", "failed ("),
        ("modeling_own.Nothing", "failed ("),
    ],
)
def test_code_that_is_not_there_or_elsewhere_is_one_sentence(tmp_path, monkeypatch, reference, said):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tiny(tmp_path / "own_code2", "llama")
    (folder / "modeling_own.py").write_text("class Other:\n    pass\n")
    edit(folder / "config.json", architectures=["OwnModel"], auto_map={"AutoModelForCausalLM": reference})
    with pytest.raises(fs.UserError) as error:
        fs.load(folder, device="cpu", trust_remote_code=True)
    assert said in str(error.value)
    assert str(error.value).isprintable()


def test_an_interrupt_behind_an_import_error_is_an_interrupt(tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise ModuleNotFoundError("Could not import module 'LlamaForCausalLM'.") from error

    folder = tiny(tmp_path / "m")
    monkeypatch.setattr(transformers.LlamaForCausalLM, "from_pretrained", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fs.load(folder, device="cpu")


def test_an_error_while_an_interrupt_is_handled_stays_an_error(tmp_path):
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        with pytest.raises(fs.UserError):
            fs.load(tmp_path / "nowhere")
