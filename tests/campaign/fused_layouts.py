"""The cases of `layouts` with the stand-in of Transformer Engine's layers."""

from __future__ import annotations

from tests.campaign.layouts import fused_cases as cases
from tests.campaign.layouts import try_case

__all__ = ["cases", "try_case"]
