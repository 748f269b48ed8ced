"""The stand-in of Transformer Engine has the signatures of the real package that Megatron-Core calls."""

from __future__ import annotations

import json

import pytest

from megatron_rl.config.derive import has_transformer_engine
from tests.conftest import STANDIN
from tests.te_standin.signatures import signatures


def test_signatures_are_those_of_the_real_package():
    assert signatures(STANDIN) == json.loads((STANDIN / "signatures.json").read_text())


def test_it_is_found_as_the_real_package_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(STANDIN)
    assert has_transformer_engine()
