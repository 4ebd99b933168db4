"""The logit lens at the anchors equals hidden states of transformers with norm and head applied by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from test_pipeline_decode import MASK, PROMPTS, SHAPE, build_model
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    RobertaConfig,
    RobertaForMaskedLM,
)
from typer.testing import CliRunner

import floatscope as fs
from floatscope.cli.main import app
from floatscope.schema import State

LIFT = fs.Watch(fields=("received", "uniform", "eligible"))


def double(model: fs.Model) -> fs.Model:
    return replace(model, module=model.module.double())


def apply_readout(model: fs.Model, stream: torch.Tensor) -> torch.Tensor:
    """Apply norm and head, by name."""
    module = model.module
    match type(module).__name__:
        case "BertForMaskedLM":
            return module.cls(stream)
        case "RobertaForMaskedLM":
            return module.lm_head(stream)
        case "ModernBertForMaskedLM":
            return module.decoder(module.head(module.model.final_norm(stream)))
        case "GPT2LMHeadModel":
            return module.lm_head(module.transformer.ln_f(stream))
    return module.lm_head(module.model.norm(stream))


def run_reference(model: fs.Model, prompt: list[int], k: int, **settings) -> list[tuple]:
    """For one prompt: a forward over the whole canvas at every step, its hidden states, and plain loops."""
    causal = model.spec.paradigm == "arm"
    out, rows = fs.decode(model, [prompt], watch=LIFT, **settings), []
    for step in out:
        tokens = step.before.tokens
        encoder = type(model.module).__name__.endswith("ForMaskedLM")
        extra = {} if encoder else {"use_cache": False, "is_causal": causal}
        if model.spec.first_position:
            extra["position_ids"] = torch.arange(tokens.shape[1])[None] + model.spec.first_position
        with torch.no_grad():
            states = model.module(input_ids=tokens, output_hidden_states=True, **extra).hidden_states
        for layer in range(len(out.capture.layers)):
            lift = out.lift(layer)[0].tolist()
            order = sorted((key for key, x in enumerate(lift) if x == x), key=lambda key: -lift[key])
            for rank, key in enumerate(order[:k]):
                with torch.no_grad():
                    p = apply_readout(model, states[layer])[0, key].double().softmax(-1)
                entropy = -float((p * p.log()).sum())
                best = p.argsort(descending=True)[:2].tolist()
                predicted = key + (1 if causal or model.spec.shift else 0)
                state = State(int(step.before.states[0, key])).name.lower()
                read = [str(best[0]), float(p[best[0]]), str(best[1]), float(p[best[1]])]
                place = (step.before.step, layer, rank, key, str(int(tokens[0, key])), state)
                rows.append((*place, lift[key], predicted, entropy, *read))
    return rows


def check(table: pd.DataFrame, rows: list[tuple], rtol: float = 1e-5) -> None:
    columns = [name for name in table.columns if name != "sample"]
    for name, mine, want in zip(columns, table[columns].T.to_numpy(), zip(*rows, strict=True), strict=True):
        if isinstance(want[0], float):
            np.testing.assert_allclose(mine.astype(float), want, rtol, err_msg=name)
        else:
            assert list(mine) == list(want), name


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["unshifted", "shifted", "encoder", "arm"])
def test_the_lens_equals_hidden_states_through_norm_and_head(kind, seed):
    model, settings = double(build_model(kind, seed)), {"new_tokens": 5}
    table = fs.lens(model, [PROMPTS[0]], anchors=2, top_tokens=2, **settings)
    check(table, run_reference(model, PROMPTS[0], 2, **settings), 1e-6)
    assert set(table.state) <= ({"prompt", "committed"} if kind == "arm" else {"prompt", "masked", "committed"})


@pytest.mark.parametrize("kind", ["unshifted", "shifted", "encoder", "arm"])
def test_a_padded_batch_equals_its_prompts_alone(kind):
    model, settings = double(build_model(kind)), {"new_tokens": 5, "temperature": 0.0}
    table = fs.lens(model, PROMPTS, anchors=3, top_tokens=2, samples=["long", "short"], **settings)
    assert set(table["sample"]) == {"long", "short"}
    for name, prompt in zip(("long", "short"), PROMPTS, strict=True):
        check(table[table["sample"] == name], run_reference(model, prompt, 3, **settings), 1e-6)


def build_other_models() -> dict[str, fs.Model]:
    small = {**SHAPE, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    gpt = GPT2Config(vocab_size=50, n_embd=32, n_layer=3, n_head=4, bos_token_id=None, eos_token_id=None)
    roberta = RobertaConfig(**{**small, "pad_token_id": 1}, max_position_embeddings=40)
    modern = ModernBertConfig(**small, cls_token_id=None, sep_token_id=None, global_attn_every_n_layers=1)
    return {
        "gpt2": fs.Model(GPT2LMHeadModel(gpt).eval(), fs.ModelSpec("gpt2", fs.Paradigm.ARM, None)),
        "gpt2 without a cache": fs.Model(
            GPT2LMHeadModel(gpt).eval(), fs.ModelSpec("gpt2", fs.Paradigm.ARM, None, supports_cache=False)
        ),
        "roberta": fs.Model(
            RobertaForMaskedLM(roberta).eval(), fs.ModelSpec("roberta", fs.Paradigm.MDM, MASK, first_position=2)
        ),
        "modernbert": fs.Model(ModernBertForMaskedLM(modern).eval(), fs.ModelSpec("modernbert", fs.Paradigm.MDM, MASK)),
    }


@pytest.mark.parametrize("name", ["gpt2", "gpt2 without a cache", "roberta", "modernbert"])
def test_the_readout_of_other_architectures_is_found(name):
    model = double(build_other_models()[name])
    check(
        fs.lens(model, PROMPTS[0], top_tokens=2, new_tokens=4), run_reference(model, PROMPTS[0], 1, new_tokens=4), 1e-6
    )


def test_the_keys_equal_the_top_keys_of_the_trace():
    model = build_model("unshifted")
    table = fs.lens(model, PROMPTS[0], new_tokens=6)
    trace = fs.decode(model, PROMPTS[0], new_tokens=6, watch=fs.Watch()).trace
    for layer, mine in table.groupby("layer"):
        assert mine.key.tolist() == trace.top_key(layer).tolist()


def test_the_unguided_pass_is_not_read():
    """The second forward of guidance, without the prompt, does not affect the table."""
    model, settings = double(build_model("unshifted")), {"new_tokens": 4, "guidance": 1.0}
    check(fs.lens(model, PROMPTS[0], top_tokens=2, **settings), run_reference(model, PROMPTS[0], 1, **settings), 1e-6)


def test_the_model_is_restored():
    model = build_model("arm")
    before = fs.decode(model, PROMPTS, new_tokens=4).tokens
    fs.lens(model, PROMPTS, new_tokens=4)
    assert torch.equal(fs.decode(model, PROMPTS, new_tokens=4).tokens, before)
    for part in model.module.modules():
        assert not part._forward_hooks
        assert not part._forward_pre_hooks


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"anchors": 0}, "anchors must be a whole number of at least 1, got 0"),
        ({"top_tokens": True}, "top_tokens must be a whole number of at least 1, got True"),
        ({"top_tokens": 51}, "top_tokens=51 exceeds the 50 tokens of arm; give a smaller number"),
        ({"new_tokens": -1}, "new_tokens"),
    ],
)
def test_a_mistake_gets_a_one_sentence_error(settings, message):
    with pytest.raises(fs.UserError, match=message):
        fs.lens(build_model("arm"), PROMPTS, **settings)


def test_logits_that_are_scaled_after_the_head_are_refused():
    config = GraniteConfig(**SHAPE, num_key_value_heads=2, logits_scaling=2.0, eos_token_id=None, bos_token_id=None)
    model = fs.Model(GraniteForCausalLM(config).eval(), fs.ModelSpec("granite", fs.Paradigm.ARM, None))
    with pytest.raises(fs.UserError, match="in GraniteForCausalLM no modules lead from the last block to the logits"):
        fs.lens(model, PROMPTS[0], new_tokens=2)


class Single(nn.Module):
    """One attention and no blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(self, input_ids):
        x = self.embedding(input_ids)[:, None]
        return SimpleNamespace(logits=self.head(F.scaled_dot_product_attention(x, x, x)[:, 0]))


def test_a_model_without_blocks_is_refused():
    model = fs.Model(Single().eval(), fs.ModelSpec("single", fs.Paradigm.MDM, MASK))
    with pytest.raises(fs.UserError, match="and Single has no list of blocks with attention"):
        fs.lens(model, PROMPTS[0], new_tokens=2)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("models")
    for architecture in ("llada", "llama"):
        fs.write_random(home / architecture, architecture, seed=2, layers=2, width=32, context=256)
    questions = {"b": "Who lives in Velmora?", "a": "Who?", "c": "Who else lives there with Mira and Jon?"}
    lines = [{"id": name, "question": question, "answer": "Mira"} for name, question in questions.items()]
    (home / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return home


def run_lens(home, *words: str, architecture: str = "llada"):
    return CliRunner(env={"COLUMNS": "100"}).invoke(
        app, ["lens", str(home / architecture), "--new-tokens", "8", *words]
    )


@pytest.mark.parametrize("architecture", ["llada", "llama"])
def test_the_command_prints_layers_by_steps_and_writes_every_row(home, architecture, tmp_path):
    out = tmp_path / "lens.csv"
    done = run_lens(home, "--prompt", "What floats?", "--no-stop", "--out", str(out), architecture=architecture)
    assert done.exit_code == 0, done.output
    shown = done.stdout.splitlines()
    assert max(map(len, shown)) <= 100
    assert [word for line in shown if "step" in line and "layer" in line for word in line.split()][-1] == "7"
    assert ("predicts the next position" in " ".join(done.stdout.split())) == (architecture == "llama")
    table = fs.lens(fs.load(home / architecture), "What floats?", new_tokens=8, stop=False)
    written = pd.read_csv(out, keep_default_na=False)
    assert len(written) == len(table) == 16
    assert written.key.tolist() == table.key.tolist()
    np.testing.assert_allclose(written.p_1, table.p_1, 1e-5)
    first = table.iloc[0]
    assert f"@{first.key} {first.lift:.1f}×" in done.stdout


def test_samples_keep_their_order_and_json_contains_all_rows(home):
    done = run_lens(
        home, "--data", str(home / "data.jsonl"), "--limit", "3", "--anchors", "2", "--top-tokens", "1", "--json"
    )
    rows = json.loads(done.stdout)["rows"]
    assert list(dict.fromkeys(row["sample"] for row in rows)) == ["b", "a", "c"]
    assert {row["rank"] for row in rows} == {0, 1}
    assert "token_2" not in rows[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give either --data FILE or --prompt TEXT"),
        (["--prompt", "a", "--limit", "2"], "--limit, --format and --skip-bad apply to --data"),
        (["--prompt", "a", "--out", "lens.txt"], "--out must be a .csv file in a folder that exists"),
        (["--prompt", "a", "--anchors", "0"], "'--anchors': it should be greater than or equal to 1"),
    ],
)
def test_the_command_refuses_in_one_sentence(home, words, message):
    done = run_lens(home, *words)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
