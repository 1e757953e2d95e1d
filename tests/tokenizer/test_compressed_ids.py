"""The compressed-id table against the golden one and the definition's corners."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quickseek.errors import TokenizerError
from quickseek.tokenizer.compressed_ids import check_compressed_count, compressed_id_table
from quickseek.tokenizer.tokenizer import Tokenizer


def test_the_golden_tokenizer_gives_the_golden_table(golden_tokenizer: Tokenizer, golden_checkpoint: Path) -> None:
    expected = load_file(golden_checkpoint.parent / "golden" / "engram_constants.safetensors")["token_map"]
    table = compressed_id_table(golden_tokenizer, 512)
    assert table.dtype == torch.int32
    assert torch.equal(table, expected.to(torch.int32))
    assert len(table.unique()) == 385
    assert not torch.equal(table, torch.arange(512, dtype=torch.int32))


def test_the_count_must_be_the_configurations(golden_tokenizer: Tokenizer) -> None:
    table = compressed_id_table(golden_tokenizer, 512)
    check_compressed_count(table, 385)
    for wrong in (384, 386):
        with pytest.raises(TokenizerError, match=f"385 compressed ids.* {wrong}"):
            check_compressed_count(table, wrong)


def test_case_accents_and_width_are_folded_but_other_words_are_not(golden_tokenizer: Tokenizer) -> None:
    table = compressed_id_table(golden_tokenizer, 512)

    def compressed(text: str) -> int:
        (number,) = golden_tokenizer.encode(text)
        return int(table[number])

    assert compressed("café") == compressed("CAFÉ") == compressed(" cafe") != compressed("naive")
    assert compressed("AB") == compressed("ab") == compressed(" ＡＢ")
    assert compressed(" ") != compressed("a")
    assert table[:3].tolist() == [0, 1, 2]


def test_ids_the_tokenizer_lacks_share_one_compressed_id(golden_tokenizer: Tokenizer) -> None:
    table = compressed_id_table(golden_tokenizer, 520)
    assert torch.equal(table[:512], compressed_id_table(golden_tokenizer, 512))
    assert table[512:].tolist() == [385] * 8


def test_a_tokenizer_larger_than_the_model_is_refused(golden_tokenizer: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match="512 ids: expected at most 511"):
        compressed_id_table(golden_tokenizer, 511)
