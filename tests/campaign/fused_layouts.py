"""The cases of `layouts` with Transformer Engine's layers, of which the host has a stand-in in torch."""

from __future__ import annotations

from tests.campaign.layouts import fused_cases as cases
from tests.campaign.layouts import try_case

__all__ = ["cases", "try_case"]
