"""Vocabularies: ids, bytes, hashes, and equality with the recorded tokenizer."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tandem.chat_template import ChatTemplateError
from tandem.models.gguf_tokenizer import convert_gguf_tokenizer
from tandem.vocabulary import Vocabulary, VocabularyError
from tests.fixtures.tiny_gguf import write_gguf
from tests.fixtures.tiny_models import tiny_model

FIXTURES = Path(__file__).parents[1] / "fixtures"
RECORDED = json.loads((FIXTURES / "tokenizer_smollm2_135m.json").read_text(encoding="utf-8"))
GREEDY = json.loads((FIXTURES / "greedy_smollm2_135m.json").read_text(encoding="utf-8"))


def metaspace_tokenizer() -> Tokenizer:
    """SentencePiece style: a mark for each space and before the first word, byte tokens for the rest."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [*"abcdelorwHW!\u2581", "\u2581a", "\u2581b", "He", "\u2581Hello", "\u2581world", "\u2581\u2581"]
    vocab = [(token, -float(index)) for index, token in enumerate(tokens)]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def save(tokenizer: Tokenizer, directory: Path, **config: Any) -> Path:
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def demo(demo_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    """Converted anew, so that the tests see the code and not an earlier pull."""
    directory = tmp_path_factory.mktemp("demo")
    convert_gguf_tokenizer(next(demo_dir.glob("*.gguf")), directory)
    return Vocabulary.load(directory)


@pytest.fixture
def metaspace(tmp_path: Path) -> Vocabulary:
    return Vocabulary.load(save(metaspace_tokenizer(), tmp_path, bos_token="<s>", eos_token={"content": "</s>"}))


@pytest.mark.model
@pytest.mark.parametrize("case", RECORDED["texts"], ids=lambda case: ascii(case["text"])[:30])
def test_ids_equal_the_recorded_tokenizer(case: dict[str, Any], demo: Vocabulary) -> None:
    assert demo.encode(case["text"]) == case["ids"]
    assert demo.decode(case["ids"]) == case["decoded"]
    assert demo.decode(case["ids"], skip_special=False) == case["text"]


@pytest.mark.model
def test_chats_equal_the_recorded_renderings(demo: Vocabulary) -> None:
    for chat in RECORDED["chats"]:
        assert demo.render_chat(chat["messages"]) == chat["text"]
        assert demo.encode_chat(chat["messages"]) == chat["ids"]


@pytest.mark.model
def test_prompts_of_the_greedy_fixture_are_what_the_vocabulary_encodes(demo: Vocabulary) -> None:
    for entry in GREEDY["prompts"]:
        assert demo.encode_chat([{"role": "user", "content": entry["prompt"]}]) == entry["prompt_ids"]
    assert demo.eos_token_ids == (GREEDY["eos_token_id"],)


@pytest.mark.model
def test_the_demo_vocabulary_is_complete_and_also_found_beside_its_gguf_file(
    demo_dir: Path, demo: Vocabulary
) -> None:
    vocabulary = Vocabulary.load(next(demo_dir.glob("*.gguf")))

    assert vocabulary.bytes_table == demo.bytes_table
    assert vocabulary.vocab_size == 49_152
    assert vocabulary.special_ids == frozenset(range(17))
    assert (vocabulary.bos_token_id, vocabulary.add_bos) == (1, False)
    assert vocabulary.id_bytes_hash == "118e2e0c2f2471731e233f51f164670fc351b10c1d66f47e871e73bd526938a4"


def test_a_converted_gguf_tokenizer_encodes_merges_digits_and_special_tokens(tmp_path: Path) -> None:
    convert_gguf_tokenizer(write_gguf(tmp_path / "m.gguf", tiny_model("llama")), tmp_path)
    vocabulary = Vocabulary.load(tmp_path)

    ids = vocabulary.encode("hello w\n\n12<|im_end|>")

    assert [vocabulary.token_bytes(token_id) for token_id in ids] == [
        b"<|im_start|>", b"hello", b" w", b"\n\n", b"1", b"2", b"<|im_end|>",
    ]  # fmt: skip
    assert vocabulary.decode(ids) == "hello w\n\n12"
    assert vocabulary.encode_chat([{"role": "user", "content": "hello"}]).count(1) == 1


def test_bos_is_added_once_and_only_where_the_model_wants_it(metaspace: Vocabulary, tmp_path: Path) -> None:
    assert metaspace.encode("a")[0] == 1
    assert metaspace.encode("<s>a").count(1) == 1
    assert metaspace.encode("") == [1]
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False}
    without = Vocabulary.load(save(metaspace_tokenizer(), tmp_path / "no-bos", **config))
    assert 1 not in without.encode("a")
    assert without.encode("<s>a").count(1) == 1


def test_metaspace_text_keeps_its_spaces_and_loses_only_the_added_one(metaspace: Vocabulary) -> None:
    text = "Hello world ! a  b"

    ids = metaspace.encode(text)

    assert metaspace.decode(ids) == text == metaspace_tokenizer().decode(ids)
    assert metaspace.decode(ids, at_start=False) == f" {text}"


def test_byte_tokens_join_to_characters(metaspace: Vocabulary) -> None:
    ids = metaspace.encode("ok 🔥 世")

    assert b"\xf0" in [metaspace.token_bytes(token_id) for token_id in ids]
    assert metaspace.decode(ids) == "ok 🔥 世"


def test_ids_outside_the_vocabulary_have_no_text(metaspace: Vocabulary) -> None:
    a = metaspace.encode("a")

    assert metaspace.decode([metaspace.vocab_size, *a, metaspace.vocab_size + 60, -1, 2**40]) == "a"
    assert metaspace.token_bytes(-1) == b""


def test_every_end_of_sequence_id_of_the_configs_is_found(tmp_path: Path) -> None:
    directory = save(metaspace_tokenizer(), tmp_path, eos_token="</s>")
    (directory / "generation_config.json").write_text('{"eos_token_id": [9, 2]}')
    (directory / "config.json").write_text('{"eos_token_id": 7}')

    assert Vocabulary.load(directory).eos_token_ids == (2, 7, 9)


def byte_level(words: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def test_the_hash_tells_permuted_ids_and_other_sizes_apart(tmp_path: Path) -> None:
    def hash_of(words: list[str]) -> str:
        return Vocabulary.load(save(byte_level(words), tmp_path)).id_bytes_hash

    assert hash_of(["a", "b", "c"]) == hash_of(["a", "b", "c"])
    different = [hash_of(words) for words in (["a", "b", "c"], ["b", "a", "c"], ["a", "b"], ["a", "b", "c", "d"])]
    assert len(set(different)) == 4


def test_added_tokens_stand_for_their_own_text(tmp_path: Path) -> None:
    tokenizer = byte_level(["a", "\u0120"])
    tokenizer.add_tokens([AddedToken("é x", normalized=False)])
    vocabulary = Vocabulary.load(save(tokenizer, tmp_path))

    assert vocabulary.bytes_table == (b"a", b" ", "é x".encode())
    assert vocabulary.special_ids == frozenset()


def test_other_kinds_of_tokenizer_are_refused_by_name(tmp_path: Path) -> None:
    wordpiece = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    wordpiece.decoder = decoders.WordPiece()
    with pytest.raises(VocabularyError, match=r"tokenizer\.json cannot be used: its decoder is WordPiece"):
        Vocabulary.load(save(wordpiece, tmp_path))

    wordpiece.decoder = None
    with pytest.raises(VocabularyError, match="its decoder is none"):
        Vocabulary.load(save(wordpiece, tmp_path))


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(VocabularyError, match=r"tokenizer\.json is missing"):
        Vocabulary.load(tmp_path)
    for content in ("{", "[]", "{}", '{"model": {"vocab": 3}}'):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(VocabularyError, match=r"tokenizer\.json"):
            Vocabulary.load(tmp_path)
    save(metaspace_tokenizer(), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(VocabularyError, match=r"tokenizer_config\.json cannot be read"):
        Vocabulary.load(tmp_path)


def test_a_chat_template_is_found_in_its_file_or_in_the_config(tmp_path: Path) -> None:
    hello = [{"role": "user", "content": "a"}]
    named = [{"name": "tools", "template": "T"}, {"name": "default", "template": "b{{ messages[0].content }}"}]
    directory = save(metaspace_tokenizer(), tmp_path, chat_template=named)
    assert Vocabulary.load(directory).render_chat(hello) == "ba"

    (directory / "chat_template.jinja").write_text("file")
    assert Vocabulary.load(directory).render_chat(hello) == "file"

    bare = Vocabulary.load(save(metaspace_tokenizer(), tmp_path / "bare"))
    with pytest.raises(ChatTemplateError, match="no chat template; send text"):
        bare.encode_chat(hello)


def test_a_text_with_a_lone_surrogate_is_refused(metaspace: Vocabulary) -> None:
    for vocabulary in (metaspace, Vocabulary.toy(300)):
        with pytest.raises(VocabularyError, match="cannot be encoded"):
            vocabulary.encode("\ud800")


@given(text=st.text(), vocab_size=st.integers(256, 1000))
def test_any_text_survives_a_toy_vocabulary_of_bytes(text: str, vocab_size: int) -> None:
    vocabulary = Vocabulary.toy(vocab_size)

    ids = vocabulary.encode(text)

    assert vocabulary.decode(ids) == text
    assert not set(ids) & {*vocabulary.eos_token_ids}
    assert vocabulary.vocab_size == vocab_size


@pytest.mark.parametrize("vocab_size", [2, 3, 27, 97, 98, 200, 255])
def test_a_small_toy_vocabulary_has_one_character_an_id(vocab_size: int) -> None:
    vocabulary = Vocabulary.toy(vocab_size)
    ids = list(range(vocab_size - 1))

    text = vocabulary.decode(ids)

    assert len(text) == vocab_size - 1 == len(set(text))
    assert vocabulary.encode(text) == ids
    assert vocabulary.eos_token_ids == (vocab_size - 1,)
    with pytest.raises(VocabularyError, match="has no character '世'"):
        vocabulary.encode("a世")


def test_toy_vocabularies_have_a_chat_template_and_a_least_size() -> None:
    vocabulary = Vocabulary.toy(256)
    assert vocabulary.decode(vocabulary.encode_chat([{"role": "user", "content": "hi"}])) == "user: hi\nassistant: "
    with pytest.raises(ValueError, match="at least 2 ids, not 1"):
        Vocabulary.toy(1)
