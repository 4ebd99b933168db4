"""Words ↔ ids: round trips, templates and pieces; and tokenizers that are damaged or mean harm."""

from __future__ import annotations

import json
import time

import pytest
from folders import LAYOUTS, edit, tiny
from hypothesis import example, given
from hypothesis import strategies as st

import floatscope as fs
from floatscope.models import text as module
from floatscope.models.text import ModelTokenizer, open_text

WORDS = "héllo wörld, 𝄞 floats!\n\tyes  no"


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    home = tmp_path_factory.mktemp("texts")
    return {name: open_text(tiny(home / name, name), separator=name == "bert") for name in LAYOUTS}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_text_comes_back(texts, layout):
    text = texts[layout]
    ids = text.encode(WORDS)
    assert text.decode(ids) == WORDS
    special = "[CLS]" if layout == "bert" else ""
    assert "".join(text.pieces(ids)) == special + WORDS
    assert len(text.pieces(ids)) == len(ids)


@given(st.lists(st.integers(0, 265), max_size=30))
@example([162, 203, 185, 59, 177, 142, 176, 161, 241, 222, 198])  # a character that begins among broken ones
@example([203, 160, 172, 230, 146, 231, 234])
def test_pieces_join_to_the_text_whatever_the_tokens(texts, ids):
    """Unfinished characters, special tokens in between, ids nobody has."""
    text = texts["llada"]
    pieces = text.pieces(ids)
    assert len(pieces) == len(ids)
    named = {i: text.name_of(i) or f"<{i}>" for i in range(256, 266)}
    expected, run = "", []
    for i in [*ids, None]:
        if i is None or i >= 256:
            expected += text.tokenizer.decode(run) + ("" if i is None else named[i])
            run = []
        else:
            run.append(i)
    assert "".join(pieces) == expected


def test_a_character_of_several_tokens_stands_at_the_last(texts):
    ids = texts["llada"].encode("a𝄞b")
    assert texts["llada"].pieces(ids) == ["a", "", "", "", "𝄞", "b"]
    assert texts["llada"].pieces(ids[:3]) == ["a", "", "\ufffd"]


def test_special_tokens_are_shown_by_name_and_left_out_of_the_text(texts):
    text = texts["llada"]
    ids = [*text.encode("a"), text.id_of("<|mdm_mask|>"), *text.encode("b"), 511]
    assert text.pieces(ids) == ["a", "<|mdm_mask|>", "b", "<511>"]
    assert text.decode(ids) == "ab"


def test_word_pieces_show_their_spaces_and_special_tokens_just_their_names():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["[UNK]", "[CLS]", "[MASK]", "float", "##ing", "anchor", "##s"]
    backend = Tokenizer(models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    text = ModelTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, cls_token="[CLS]", mask_token="[MASK]"))
    ids = [1, *text.encode("floating anchors"), 2, *text.encode("floats")]
    assert text.pieces(ids) == ["[CLS]", "float", "ing", " anchor", "s", "[MASK]", "float", "s"]


def test_lladas_template_holds_the_bos_once(texts):
    text = texts["llada"]
    shown = "".join(text.pieces(text.encode("hi ", chat=True)))
    headers = "<|start_header_id|>{}<|end_header_id|>\n\n"
    assert shown == "<|startoftext|>" + headers.format("user") + "hi<|eot_id|>" + headers.format("assistant")


def test_a_tokenizer_that_adds_its_own_ends_adds_none_to_a_template(tmp_path):
    text = templated(tiny(tmp_path / "m", "bert"), "[CLS]{{ messages[0]['content'] }}")
    assert text.pieces(text.encode("hi", chat=True)) == ["[CLS]", "h", "i"]


@pytest.mark.parametrize("layout", ["dream", "llama"])
def test_chatml(texts, layout):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    shown = "".join(texts[layout].pieces(texts[layout].encode(messages, chat=True)))
    turns = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert shown == turns


def test_a_mask_written_in_a_prompt_is_the_mask(texts):
    assert texts["dream"].encode("a<|mask|>b")[1] == texts["dream"].mask_id


def test_an_encoders_separator_waits_for_the_answer(texts, tmp_path):
    text = texts["bert"]
    assert text.suffix == (text.id_of("[SEP]"),)
    assert text.pieces(text.encode("a")) == ["[CLS]", "a"]
    assert texts["llada"].suffix == texts["llama"].suffix == ()


def test_dreams_own_class_is_not_needed(tmp_path):
    folder = tiny(tmp_path / "m", "dream")
    assert sorted(p.name for p in folder.glob("*token*")) == [
        "added_tokens.json", "special_tokens_map.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert json.loads((folder / "tokenizer_config.json").read_text())["tokenizer_class"] == "DreamTokenizer"
    text = open_text(folder)
    names = ["<|beginoftext|>", "<|endoftext|>", "<|mask|>", "<|im_start|>", "<|im_end|>"]
    assert [text.id_of(name) for name in names] == [256, 257, 258, 259, 260]
    assert (text.bos_id, text.eos_id, text.mask_id, text.eot_id) == (256, 257, 258, 260)


def test_messages_need_the_template(texts):
    with pytest.raises(fs.UserError, match="messages are encoded through the chat template; set chat=True"):
        texts["llada"].encode([{"role": "user", "content": "hi"}])
    with pytest.raises(fs.UserError, match="has no chat template; encode with chat=False"):
        texts["bert"].encode("hi", chat=True)
    for bad in ([], [{"role": "user"}], [{}]):
        with pytest.raises(fs.UserError, match="messages are"):
            texts["llada"].encode(bad, chat=True)


def test_a_folder_without_a_tokenizer_takes_ids(tmp_path):
    model = fs.load(tiny(tmp_path / "m", vocabulary=64), device="cpu")
    assert model.tokenizer is None
    assert (model.spec.mask_id, model.spec.eos_id) == (63, 62)


# --- damaged and hostile ---------------------------------------------------------------------------------------------


def templated(folder, template):
    (folder / "chat_template.jinja").write_text(template)
    return open_text(folder)


@pytest.mark.parametrize(
    ("template", "said"),
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
        ("{{ (10**7)**(10**7) }}", "a power"),
        ("{{ 'a' * 5000000 }}", "it wrote 5,000,000 characters, of which 4,000,000 are allowed"),
        ("{{ raise_exception('no \x1b[31m thanks\u202e') }}", r"no \\x1b\[31m thanks\\u202e"),
    ],
)
def test_a_template_that_fails_is_one_sentence(tmp_path, template, said):
    text = templated(tiny(tmp_path / "m"), template)
    with pytest.raises(fs.UserError, match=rf"the chat template of .*m failed \(.*{said}.*\); encode with chat=False"):
        text.encode("hi", chat=True)
    assert text.encode("hi")


def test_a_template_without_end_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "TEMPLATE_SECONDS", 0.3)
    loop = "{% for i in range(99999) %}"
    text = templated(tiny(tmp_path / "m"), loop * 4 + "{% endfor %}" * 4)
    before = time.monotonic()
    with pytest.raises(fs.UserError, match="did not end within 0 s; encode with chat=False"):
        text.encode("hi", chat=True)
    assert time.monotonic() - before < 5


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["{", "[]", "\x00", "{}", '{"version": "9"}'])
def test_a_damaged_tokenizer_is_named(tmp_path, name, content):
    folder = tiny(tmp_path / "m")
    (folder / name).write_text(content)
    if name == "tokenizer_config.json" and content.startswith("{") and content != "{":
        open_text(folder)  # an object that says nothing: the rest is in tokenizer.json
        return
    with pytest.raises(fs.UserError, match=rf"{name} is damaged \(.*\); fetch it again"):
        fs.load(folder, device="cpu")


@pytest.mark.parametrize("content", ["[1]", "{}", '{"a": "b"}', '{"a": 1}', '{"a": -5}', '{"a": 3, "b": 3}', "", "{"])
def test_a_damaged_vocabulary_is_named(tmp_path, content):
    folder = tiny(tmp_path / "m", "dream")
    (folder / "vocab.json").write_text(content)
    with pytest.raises(fs.UserError, match=r"vocab\.json is damaged \("):
        fs.load(folder, device="cpu")


def test_a_vocabulary_that_needs_another_package_says_which(tmp_path, monkeypatch):
    def lacking(*args, **kwargs):
        raise ImportError("it requires sentencepiece")

    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.from_pretrained", lacking)
    with pytest.raises(fs.UserError, match=r"cannot be read without another package \(it requires sentencepiece\)"):
        fs.load(tiny(tmp_path / "m"), device="cpu")


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path):
    folder = tiny(tmp_path / "m", vocabulary=200)
    (folder / "tokenizer.json").write_text((tiny(tmp_path / "other") / "tokenizer.json").read_text())
    with pytest.raises(fs.UserError, match="its tokenizer has ids up to 261, and the model takes 0 … 199"):
        fs.load(folder, device="cpu")


@pytest.mark.parametrize("layout", ["llada", "dream"])
def test_code_of_a_tokenizer_is_not_run(tmp_path, layout):
    folder = tiny(tmp_path / "m", layout)
    (folder / "tokenization_evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    edit(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_evil.Evil", None]})
    assert fs.load(folder, device="cpu").tokenizer.decode([71, 72]) == "hi"
    assert not (tmp_path / "ran").exists()


def test_an_unknown_tokenizer_class_without_tokenizer_json_is_refused_and_nobody_is_asked(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *a: pytest.fail("the user was asked"))
    folder = tiny(tmp_path / "m", "dream")
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    edit(folder / "tokenizer_config.json", tokenizer_class="Evil", auto_map={"AutoTokenizer": ["evil.Evil", None]})
    with pytest.raises(fs.UserError, match=r"vocab\.json is read by code of its own, which is not run"):
        fs.load(folder, device="cpu")
    assert not (tmp_path / "ran").exists()


def change(folder, do, name="tokenizer.json"):
    content = json.loads((folder / name).read_text())
    do(content)
    (folder / name).write_text(json.dumps(content))


def cut(content):
    for token in list(content["model"]["vocab"])[-10:]:
        content["model"]["vocab"].pop(token)


def far(content):
    content["added_tokens"].append({**content["added_tokens"][0], "id": 9999, "content": "<x>"})


def without_a_byte(content):
    vocabulary = content["model"]["vocab"]
    vocabulary["hhh"] = vocabulary.pop("h")


def without_content(content):
    content["added_tokens"][0].pop("content")


@pytest.mark.parametrize(
    ("do", "said"),
    [
        (cut, r"<\|startoftext\|> should be 256 and is 246"),
        (far, "<x> should be 9999 and is 262"),
        (without_a_byte, "1 bytes of ordinary text have no token"),
        (without_content, ""),
    ],
)
def test_a_tokenizer_that_opens_and_is_wrong_is_refused(tmp_path, do, said):
    folder = tiny(tmp_path / "m")
    change(folder, do)
    with pytest.raises(fs.UserError, match=rf"tokenizer\.json is damaged \(.*{said}.*\); fetch it again"):
        fs.load(folder, device="cpu")


def test_a_byte_no_text_has_may_lack_a_token_and_a_text_that_has_it_is_refused(tmp_path):
    folder = tiny(tmp_path / "m")

    def without_a_control(content):
        vocabulary = content["model"]["vocab"]
        vocabulary["hhh"] = vocabulary.pop("Ą")  # byte 4

    change(folder, without_a_control)
    text = fs.load(folder, device="cpu").tokenizer
    assert text.lacking_bytes == {4}
    assert text.decode(text.encode("plain é 語 😀\n\t")) == "plain é 語 😀\n\t"
    with pytest.raises(fs.UserError, match=r"has no token for '\\x04'; take it out of the text"):
        text.encode("end\x04of it")


def test_the_names_of_bytes_are_those_of_the_library():
    from tokenizers import pre_tokenizers

    from floatscope.models.text import _byte_names

    assert sorted(_byte_names().values()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for byte, name in _byte_names().items():
        if byte < 0x80:
            assert whole.pre_tokenize_str(chr(byte))[0][0] == name


def test_settings_that_do_not_fit_are_not_blamed_on_the_vocabulary(tmp_path):
    folder = tiny(tmp_path / "m")
    edit(folder / "tokenizer_config.json", padding_side="up")
    with pytest.raises(fs.UserError, match=r"tokenizer_config\.json does not fit \(Padding side should be"):
        fs.load(folder, device="cpu")


def test_a_template_of_the_wrong_bytes_is_named(tmp_path):
    folder = tiny(tmp_path / "m")
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(fs.UserError, match=r"chat_template\.jinja is damaged \(.*\); fetch it again"):
        fs.load(folder, device="cpu")


def test_arguments_handed_on_are_no_power(tmp_path):
    text = templated(tiny(tmp_path / "m"), "{% set a = {'b': 1} %}{{ dict(**a)['b'] }} ** {{ '**' }}")
    assert text.decode(text.encode("hi", chat=True)) == "1 ** **"


def test_a_panic_of_the_tokenizer_is_one_sentence():
    class PanicException(BaseException):  # as pyo3 names it
        pass

    class Broken:
        def __call__(self, *args, **kwargs):
            raise PanicException("Onig: retry-limit-in-match over")

    with pytest.raises(fs.UserError, match=r"the tokenizer of m cannot read this text \(Onig: retry-limit"):
        module.ModelTokenizer(Broken(), "m").encode("aaaa!")


def test_a_text_is_shown_in_a_line(texts):
    assert repr(texts["llada"]).endswith("llada: 262 tokens, with a chat template)")
    assert repr(texts["bert"]).startswith("Text(")
