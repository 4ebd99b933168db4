"""Text ↔ token ids: round trips, chat templates and pieces; damaged and hostile tokenizers."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tiny_checkpoints import TINY_ARCHITECTURES, edit_json, write_tiny

import floatscope as fs
from floatscope.models.tokenizer import ModelTokenizer
from floatscope.models.tokenizer_files import open_tokenizer

WORDS = "héllo wörld, 𝄞 floats!\n\tyes  no"


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    home = tmp_path_factory.mktemp("tokenizers")
    return {
        name: open_tokenizer(write_tiny(home / name, name), has_separator=name == "bert") for name in TINY_ARCHITECTURES
    }


@pytest.mark.parametrize("architecture", TINY_ARCHITECTURES)
def test_text_survives_the_round_trip(tokenizers, architecture):
    tokenizer = tokenizers[architecture]
    ids = tokenizer.encode(WORDS)
    assert tokenizer.decode(ids) == WORDS
    special = "[CLS]" if architecture == "bert" else ""
    assert "".join(tokenizer.pieces(ids)) == special + WORDS
    assert len(tokenizer.pieces(ids)) == len(ids)


@given(st.lists(st.integers(0, 265), max_size=30))
@example([162, 203, 185, 59, 177, 142, 176, 161, 241, 222, 198])  # a character that begins among broken ones
@example([203, 160, 172, 230, 146, 231, 234])
def test_pieces_join_to_the_text_for_any_tokens(tokenizers, ids):
    """Incomplete characters, special tokens in between, ids without a token."""
    tokenizer = tokenizers["llada"]
    pieces = tokenizer.pieces(ids)
    assert len(pieces) == len(ids)
    names = {i: tokenizer.id_to_token(i) or f"<{i}>" for i in range(256, 266)}
    expected, run = "", []
    for i in [*ids, None]:
        if i is None or i >= 256:
            expected += tokenizer.hf.decode(run) + ("" if i is None else names[i])
            run = []
        else:
            run.append(i)
    assert "".join(pieces) == expected


def test_a_character_of_several_tokens_appears_at_the_last(tokenizers):
    ids = tokenizers["llada"].encode("a𝄞b")
    assert tokenizers["llada"].pieces(ids) == ["a", "", "", "", "𝄞", "b"]
    assert tokenizers["llada"].pieces(ids[:3]) == ["a", "", "\ufffd"]


def test_special_tokens_are_pieces_by_name_and_not_in_the_text(tokenizers):
    tokenizer = tokenizers["llada"]
    ids = [*tokenizer.encode("a"), tokenizer.token_to_id("<|mdm_mask|>"), *tokenizer.encode("b"), 511]
    assert tokenizer.pieces(ids) == ["a", "<|mdm_mask|>", "b", "<511>"]
    assert tokenizer.decode(ids) == "ab"


def test_word_pieces_have_their_spaces_and_special_tokens_their_names():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["[UNK]", "[CLS]", "[MASK]", "float", "##ing", "anchor", "##s"]
    backend = Tokenizer(models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    tokenizer = ModelTokenizer(
        PreTrainedTokenizerFast(tokenizer_object=backend, cls_token="[CLS]", mask_token="[MASK]")
    )
    ids = [1, *tokenizer.encode("floating anchors"), 2, *tokenizer.encode("floats")]
    assert tokenizer.pieces(ids) == ["[CLS]", "float", "ing", " anchor", "s", "[MASK]", "float", "s"]


def test_the_template_of_llada_has_one_bos(tokenizers):
    tokenizer = tokenizers["llada"]
    shown = "".join(tokenizer.pieces(tokenizer.encode("hi ", chat=True)))
    headers = "<|start_header_id|>{}<|end_header_id|>\n\n"
    assert shown == "<|startoftext|>" + headers.format("user") + "hi<|eot_id|>" + headers.format("assistant")


def test_no_special_tokens_are_added_to_a_rendered_template(tmp_path):
    tokenizer = open_with_template(write_tiny(tmp_path / "m", "bert"), "[CLS]{{ messages[0]['content'] }}")
    assert tokenizer.pieces(tokenizer.encode("hi", chat=True)) == ["[CLS]", "h", "i"]


@pytest.mark.parametrize("architecture", ["dream", "llama"])
def test_chatml_template(tokenizers, architecture):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    shown = "".join(tokenizers[architecture].pieces(tokenizers[architecture].encode(messages, chat=True)))
    turns = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert shown == turns


def test_a_mask_token_in_a_prompt_is_encoded_as_the_mask(tokenizers):
    assert tokenizers["dream"].encode("a<|mask|>b")[1] == tokenizers["dream"].mask_id


def test_the_separator_of_an_encoder_follows_the_answer(tokenizers, tmp_path):
    tokenizer = tokenizers["bert"]
    assert tokenizer.suffix == (tokenizer.token_to_id("[SEP]"),)
    assert tokenizer.pieces(tokenizer.encode("a")) == ["[CLS]", "a"]
    assert tokenizers["llada"].suffix == tokenizers["llama"].suffix == ()


def test_dreams_own_class_is_not_needed(tmp_path):
    folder = write_tiny(tmp_path / "m", "dream")
    assert sorted(p.name for p in folder.glob("*token*")) == [
        "added_tokens.json", "special_tokens_map.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert json.loads((folder / "tokenizer_config.json").read_text())["tokenizer_class"] == "DreamTokenizer"
    tokenizer = open_tokenizer(folder)
    names = ["<|beginoftext|>", "<|endoftext|>", "<|mask|>", "<|im_start|>", "<|im_end|>"]
    assert [tokenizer.token_to_id(name) for name in names] == [256, 257, 258, 259, 260]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.mask_id, tokenizer.eot_id) == (256, 257, 258, 260)


def test_messages_need_the_template(tokenizers):
    with pytest.raises(fs.UserError, match="messages need the chat template; set chat=True"):
        tokenizers["llada"].encode([{"role": "user", "content": "hi"}])
    with pytest.raises(fs.UserError, match="has no chat template; encode with chat=False"):
        tokenizers["bert"].encode("hi", chat=True)
    for messages in ([], [{"role": "user"}], [{}]):
        with pytest.raises(fs.UserError, match="messages must be a list"):
            tokenizers["llada"].encode(messages, chat=True)


def test_a_folder_without_tokenizer_files_has_no_tokenizer(tmp_path):
    model = fs.load(write_tiny(tmp_path / "m", vocab_size=64), device="cpu")
    assert model.tokenizer is None
    assert (model.spec.mask_id, model.spec.eos_id) == (63, 62)


# --- damaged and hostile ---------------------------------------------------------------------------------------------


def open_with_template(folder, template):
    (folder / "chat_template.jinja").write_text(template)
    return open_tokenizer(folder)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.__init__.__globals__ }}", "unsafe"),
        ("{% for %}", "Expected"),
        ("{{ 1 / 0 }}", "zero"),
        ("{{ nothing.there.at.all }}", "undefined"),
        ("{{ messages[7]['content'] }}", "no element 7"),
        ("{% include '/etc/passwd' %}", "loader"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% for a in 'x' %}" * 25 + "{% endfor %}" * 25, "too many statically nested blocks"),
        ("{{ 'a' * 5000000 }}", "it wrote 5,000,000 characters; at most 4,000,000 are allowed"),
        ("{{ raise_exception('no \x1b[31m thanks\u202e') }}", r"no \\x1b\[31m thanks\\u202e"),
    ],
)
def test_a_template_that_fails_gives_one_sentence(tmp_path, template, message):
    tokenizer = open_with_template(write_tiny(tmp_path / "m"), template)
    with pytest.raises(
        fs.UserError, match=rf"the chat template of .*m failed \(.*{message}.*\); encode with chat=False"
    ):
        tokenizer.encode("hi", chat=True)
    assert tokenizer.encode("hi")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["{", "[]", "\x00", "{}", '{"version": "9"}'])
def test_a_damaged_tokenizer_is_named(tmp_path, name, content):
    folder = write_tiny(tmp_path / "m")
    (folder / name).write_text(content)
    if name == "tokenizer_config.json" and content.startswith("{") and content != "{":
        open_tokenizer(folder)  # an object without settings: the rest is in tokenizer.json
        return
    with pytest.raises(fs.UserError, match=rf"{name} is damaged \(.*\); download it again"):
        fs.load(folder, device="cpu")


@pytest.mark.parametrize("content", ["[1]", "{}", '{"a": "b"}', '{"a": 1}', '{"a": -5}', '{"a": 3, "b": 3}', "", "{"])
def test_a_damaged_vocabulary_is_named(tmp_path, content):
    folder = write_tiny(tmp_path / "m", "dream")
    (folder / "vocab.json").write_text(content)
    with pytest.raises(fs.UserError, match=r"vocab\.json is damaged \("):
        fs.load(folder, device="cpu")


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    def fail_import(*args, **kwargs):
        raise ImportError("it requires sentencepiece")

    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.from_pretrained", fail_import)
    with pytest.raises(fs.UserError, match=r"needs another package \(it requires sentencepiece\)"):
        fs.load(write_tiny(tmp_path / "m"), device="cpu")


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path):
    folder = write_tiny(tmp_path / "m", vocab_size=200)
    (folder / "tokenizer.json").write_text((write_tiny(tmp_path / "other") / "tokenizer.json").read_text())
    with pytest.raises(fs.UserError, match="its tokenizer has ids up to 261, but the model accepts 0 … 199"):
        fs.load(folder, device="cpu")


@pytest.mark.parametrize("architecture", ["llada", "dream"])
def test_the_code_of_a_tokenizer_is_not_run(tmp_path, architecture):
    folder = write_tiny(tmp_path / "m", architecture)
    (folder / "tokenization_own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    edit_json(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_own.Own", None]})
    assert fs.load(folder, device="cpu").tokenizer.decode([71, 72]) == "hi"
    assert not (tmp_path / "ran").exists()


def test_an_unknown_tokenizer_class_is_refused_without_a_prompt(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *a: pytest.fail("the user was asked"))
    folder = write_tiny(tmp_path / "m", "dream")
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    edit_json(folder / "tokenizer_config.json", tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.Own", None]})
    with pytest.raises(fs.UserError, match=r"vocab\.json needs the checkpoint's own code, which is not run"):
        fs.load(folder, device="cpu")
    assert not (tmp_path / "ran").exists()


def change_json(folder, change, name="tokenizer.json"):
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))


def truncate(content):
    for token in list(content["model"]["vocab"])[-10:]:
        content["model"]["vocab"].pop(token)


def add_distant_id(content):
    content["added_tokens"].append({**content["added_tokens"][0], "id": 9999, "content": "<x>"})


def remove_byte(content):
    vocabulary = content["model"]["vocab"]
    vocabulary["hhh"] = vocabulary.pop("h")


def remove_content(content):
    content["added_tokens"][0].pop("content")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (truncate, r"<\|startoftext\|> has id 246 instead of 256"),
        (add_distant_id, "<x> has id 262 instead of 9999"),
        (remove_byte, "1 bytes of ordinary text have no token"),
        (remove_content, ""),
    ],
)
def test_a_tokenizer_that_opens_but_is_wrong_is_refused(tmp_path, change, message):
    folder = write_tiny(tmp_path / "m")
    change_json(folder, change)
    with pytest.raises(fs.UserError, match=rf"tokenizer\.json is damaged \(.*{message}.*\); download it again"):
        fs.load(folder, device="cpu")


def test_a_control_byte_may_have_no_token_and_a_text_with_it_is_refused(tmp_path):
    folder = write_tiny(tmp_path / "m")

    def remove_control_byte(content):
        vocabulary = content["model"]["vocab"]
        vocabulary["hhh"] = vocabulary.pop("Ą")  # byte 4

    change_json(folder, remove_control_byte)
    tokenizer = fs.load(folder, device="cpu").tokenizer
    assert tokenizer.missing_bytes == {4}
    assert tokenizer.decode(tokenizer.encode("plain é 語 😀\n\t")) == "plain é 語 😀\n\t"
    with pytest.raises(fs.UserError, match=r"has no token for '\\x04'; remove it from the text"):
        tokenizer.encode("end\x04of it")


def test_the_byte_level_alphabet_is_that_of_the_library():
    from tokenizers import pre_tokenizers

    from floatscope.models.tokenizer import byte_level_alphabet

    assert sorted(byte_level_alphabet().values()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for byte, name in byte_level_alphabet().items():
        if byte < 0x80:
            assert byte_level.pre_tokenize_str(chr(byte))[0][0] == name


def test_a_wrong_tokenizer_config_is_named(tmp_path):
    folder = write_tiny(tmp_path / "m")
    edit_json(folder / "tokenizer_config.json", padding_side="up")
    with pytest.raises(
        fs.UserError, match=r"tokenizer_config\.json does not fit tokenizer\.json \(Padding side should be"
    ):
        fs.load(folder, device="cpu")


def test_a_template_that_is_not_utf8_is_named(tmp_path):
    folder = write_tiny(tmp_path / "m")
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(fs.UserError, match=r"chat_template\.jinja is damaged \(.*\); download it again"):
        fs.load(folder, device="cpu")


def test_a_panic_of_the_tokenizer_gives_one_sentence():
    class PanicException(BaseException):  # as pyo3 names it
        pass

    class Broken:
        def __call__(self, *args, **kwargs):
            raise PanicException("Onig: retry-limit-in-match over")

    with pytest.raises(fs.UserError, match=r"the tokenizer of m cannot read this text \(Onig: retry-limit"):
        ModelTokenizer(Broken(), "m").encode("aaaa!")


def test_the_repr_of_a_tokenizer_is_one_line(tokenizers):
    assert repr(tokenizers["llada"]).endswith("llada: 262 tokens, with a chat template)")
    assert repr(tokenizers["bert"]).startswith("ModelTokenizer(")
