"""Requirements of a hybrid engine on the stores whose weights it writes."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.distributed import device
from megatron_rl.errors import UserError
from megatron_rl.hybrid_engine.sync import HybridEngine
from tests.sampling import engine_of


def test_an_engine_that_names_no_weights_is_refused_by_name():
    device.initialize()
    engine = engine_of(lambda tokens, lengths: torch.zeros(len(lengths), 7))
    hybrid = HybridEngine(None, engine)
    with pytest.raises(UserError, match="returned no boxes") as raised:
        hybrid.sync()
    assert raised.value.where == "TorchEngine on rank 0"
    assert engine.weights_version == -1
