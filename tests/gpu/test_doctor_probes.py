"""The probes of ``quickseek doctor`` on a machine that has GPUs."""

import pytest
import torch

from quickseek.decode import probes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_every_gpu_reports_itself_and_copies_arrive():
    found = {probe.name: probe for probe in probes.probes()}
    assert found["GPU 0"].advice is None and "GiB free" in found["GPU 0"].found
    assert "unknown" not in found["multicast"].found
    if torch.cuda.device_count() > 1:
        assert found["peer access"].advice is None
