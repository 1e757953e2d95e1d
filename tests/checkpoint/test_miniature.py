"""The miniatures: real formats, recomputable weights, the same bytes each time, a tokenizer that fits."""

import hashlib
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, normalizers

from quickseek.checkpoint.inventory import inventory
from quickseek.checkpoint.miniature import miniature_config, miniature_tensors, write_miniature
from quickseek.checkpoint.miniature_tokenizer import CONTROL_TOKENS, build_tokenizer
from quickseek.checkpoint.reader import Checkpoint
from quickseek.checkpoint.recipe import logical_shape, logical_weight
from quickseek.errors import TokenizerError
from quickseek.formats import dequantize_a8, dequantize_fp4_rows, dequantize_fp8_blocks
from quickseek.tokenizer.compressed_ids import check_compressed_count, compressed_id_table
from quickseek.tokenizer.tokenizer import Tokenizer as ModelTokenizer

NAMES = ("tiny", "tiny-tp", "mid")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("miniature") / "tiny"
    write_miniature(directory)
    return directory


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def test_tiny_is_a_complete_checkpoint_of_its_configuration(tiny: Path) -> None:
    checkpoint = Checkpoint.open(tiny)
    checkpoint.check()
    assert checkpoint.config == miniature_config("tiny")
    assert set(checkpoint.names) == set(inventory(miniature_config("tiny")))
    assert {"layers.0.ffn.gate.bias_vl", "mtp.2.ffn.gate.bias_vl"} <= set(checkpoint.names)
    assert not any(name.startswith(("vision", "aligner", "image")) for name in checkpoint.names)


def test_tiny_has_the_same_bytes_each_time(tiny: Path, tmp_path: Path) -> None:
    write_miniature(tmp_path / "again", "tiny")
    write_miniature(tmp_path / "other", "tiny-tp")
    assert digests(tmp_path / "again") == digests(tiny)
    assert digests(tmp_path / "other")["model-00001-of-00001.safetensors"] not in digests(tiny).values()


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    return ((value.double() - reference).square().mean() / reference.square().mean()).sqrt().item()


def test_every_stored_weight_is_its_recomputed_weight_within_its_format(tiny: Path) -> None:
    checkpoint = Checkpoint.open(tiny)
    specs = inventory(checkpoint.config)
    for name, spec in specs.items():
        if spec.dtype == "F8_E8M0":
            continue
        weight = logical_weight(name, logical_shape(spec))
        stored = checkpoint.read(name)
        if spec.dtype in ("F8_E4M3", "I8"):
            scales = checkpoint.read(name.removesuffix("weight") + "scale")
            rows = dequantize_a8 if ".engram.embed." in name else dequantize_fp4_rows
            decode = rows if rows is dequantize_a8 or spec.dtype == "I8" else dequantize_fp8_blocks
            stored = decode(stored, scales, torch.float64)
        assert relative_error(stored, weight) < {"F32": 1e-7, "BF16": 3e-3, "F8_E4M3": 0.04, "I8": 0.16}[spec.dtype]


def test_the_format_bounds_notice_swapped_nibbles_and_a_neighbour_s_scale(tiny: Path) -> None:
    checkpoint = Checkpoint.open(tiny)
    name = "layers.0.ffn.experts.0.w1"
    weight = logical_weight(name + ".weight", (64, 256))
    packed, scales = checkpoint.read(name + ".weight"), checkpoint.read(name + ".scale")
    swapped = (packed << 4) | (packed >> 4)
    assert relative_error(dequantize_fp4_rows(swapped, scales), weight) > 0.5
    assert relative_error(dequantize_fp4_rows(packed, scales + 1), weight) > 0.5


@pytest.mark.parametrize("name", NAMES)
def test_every_miniature_has_all_kinds_of_layers_and_candidates_that_bind(name: str) -> None:
    config = miniature_config(name)
    indexed = [layer for layer in range(config.num_hidden_layers) if config.ratio(layer)]
    full = [layer for layer in indexed if config.kv_source(layer) == layer]
    reindexed = [layer for layer in indexed if config.index_source(layer) == layer and layer not in full]
    reused = [layer for layer in indexed if config.index_source(layer) != layer]
    assert {config.ratio(layer) for layer in full} == {1, 2}
    assert reindexed and reused and all(config.reads_candidates(layer) for layer in reindexed)
    candidates = config.candidate_topk_blocks * config.candidate_block_size
    assert config.index_topk < candidates < config.max_position_embeddings
    assert len(config.engram_layer_ids) == 2 and config.num_nextn_predict_layers == 3
    assert config.engram_layer_ids[0] < full[0] < config.engram_layer_ids[1]


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_tiny_tp_and_mid_divide_over_eight_ranks_in_blocks_of_32(degree: int) -> None:
    for name in ("tiny-tp", "mid"):
        config = miniature_config(name)
        assert config.o_groups % degree == 0 and config.num_attention_heads % degree == 0
        assert config.moe_intermediate_size // degree % 32 == 0


def test_mid_has_engram_tables_of_about_a_hundred_thousand_rows() -> None:
    assert all(95_000 < rows < 105_000 for rows in miniature_config("mid").engram_num_embeddings)


def test_the_stream_of_a_miniature_is_its_whole_inventory() -> None:
    config = miniature_config("tiny")
    assert {name for name, _ in miniature_tensors(config)} == set(inventory(config))


def test_another_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="config = 'large': expected one of tiny, tiny-tp, mid"):
        miniature_config("large")


# ------------------------------------------------------------------------------------------ tokenizer


def compressed_ids(tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """The rule of spec 8.1, as directly as it reads."""
    normalize = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), "\ue000"),
            normalizers.Strip(),
            normalizers.Replace("\ue000", " "),
        ]
    )
    ids: dict[str, int] = {}
    table = []
    for token in range(vocab_size):
        text = tokenizer.decode([token], skip_special_tokens=False)
        key = tokenizer.id_to_token(token) if "�" in text else normalize.normalize_str(text) or text
        table.append(ids.setdefault(key, len(ids)))
    return table


@pytest.mark.parametrize("name", NAMES)
def test_the_number_of_compressed_ids_is_what_the_configuration_says(name: str) -> None:
    config = miniature_config(name)
    table = compressed_ids(build_tokenizer(config.vocab_size), config.vocab_size)
    assert len(set(table)) == config.engram_compressed_vocab_size
    assert table[:3] == [0, 1, 2] and config.engram_pad_token_id == 2
    shorter = compressed_ids(build_tokenizer(config.vocab_size), 300)
    assert len(set(shorter)) != config.engram_compressed_vocab_size


@pytest.mark.parametrize("name", NAMES)
def test_every_id_decodes_and_encodes_back_where_it_is_text(name: str) -> None:
    config = miniature_config(name)
    tokenizer = build_tokenizer(config.vocab_size)
    assert tokenizer.get_vocab_size() == config.vocab_size
    for token in range(config.vocab_size):
        text = tokenizer.decode([token], skip_special_tokens=False)
        assert text
        if "�" not in text:
            assert tokenizer.encode(text, add_special_tokens=False).ids == [token]


def test_any_text_survives_encoding_and_control_tokens_have_their_ids() -> None:
    tokenizer = build_tokenizer(512)
    text = "The café, naïve\r\n\r\n\tand 数学 🙂 <|EOT|> end\x00\x7f  "
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text
    assert [tokenizer.token_to_id(token) for token in CONTROL_TOKENS] == list(range(len(CONTROL_TOKENS)))
    assert tokenizer.token_to_id("<｜System｜>") == miniature_config("tiny").dspark_noise_token_id
    prompt = "<｜begin▁of▁sentence｜><｜System｜>S<｜User｜>U<｜Assistant｜></think>"
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    assert [id for id in ids if id < len(CONTROL_TOKENS)] == [0, 7, 3, 4, 6] and len(ids) == 7


@pytest.mark.parametrize("vocab_size", [200, 100_000])
def test_a_vocabulary_that_the_fillers_cannot_fill_is_refused(vocab_size: int) -> None:
    with pytest.raises(ValueError, match=f"vocab_size = {vocab_size}"):
        build_tokenizer(vocab_size)


def test_the_written_tokenizer_is_the_built_one(tiny: Path) -> None:
    written = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    assert written.get_vocab(with_added_tokens=True) == build_tokenizer(512).get_vocab(with_added_tokens=True)


def test_the_written_tokenizer_passes_the_check_that_the_model_makes(tiny: Path) -> None:
    config = miniature_config("tiny")
    table = compressed_id_table(ModelTokenizer.from_directory(tiny), config.vocab_size)
    assert table.tolist() == compressed_ids(build_tokenizer(512), 512)
    check_compressed_count(table, config.engram_compressed_vocab_size)
    with pytest.raises(TokenizerError):
        check_compressed_count(table, config.engram_compressed_vocab_size + 1)
