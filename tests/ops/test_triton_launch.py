"""Launches fill the GPU that they run on; an H200 is planned for where there is none."""

from types import SimpleNamespace

import pytest
import torch

from quickseek.ops import triton_launch
from quickseek.ops.attention import triton as attention
from quickseek.ops.triton_launch import H200_MULTIPROCESSORS, multiprocessors


def test_each_gpu_is_asked_once_and_a_cpu_plans_for_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def properties(index: int) -> SimpleNamespace:
        asked.append(index)
        return SimpleNamespace(multi_processor_count=[132, 148][index])

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    triton_launch._of_gpu.cache_clear()
    try:
        gpus = [torch.device("cuda", index) for index in (0, 1, 1, 0)]
        assert [multiprocessors(gpu) for gpu in gpus] == [132, 148, 148, 132] and asked == [0, 1]
        assert multiprocessors(torch.device("cpu")) == H200_MULTIPROCESSORS and asked == [0, 1]
    finally:
        triton_launch._of_gpu.cache_clear()


def test_a_larger_gpu_splits_rows_further() -> None:
    assert attention.tiles_of_a_program(70, 12, 148) < attention.tiles_of_a_program(70, 12, 132)
