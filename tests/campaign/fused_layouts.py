"""The campaign of `layouts` with Transformer Engine's layers, which a stand-in in torch gives the host."""

from __future__ import annotations

from tests.campaign.layouts import fused_cases as cases
from tests.campaign.layouts import try_case

__all__ = ["cases", "try_case"]
