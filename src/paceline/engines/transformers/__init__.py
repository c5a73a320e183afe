"""The Hugging Face Transformers engine: `attach` a capacity policy to a model in memory."""

from paceline.engines.sharing import SharedBudgetWarning, SharedCacheWarning
from paceline.engines.transformers.attach import attach
from paceline.engines.transformers.config import load_policy, save_policy
from paceline.engines.transformers.handle import (
    CapNeverAppliedWarning,
    LayerSupport,
    ModelStats,
    Pace,
)
from paceline.engines.transformers.state import UnknownTokensWarning

__all__ = [
    "CapNeverAppliedWarning",
    "LayerSupport",
    "ModelStats",
    "Pace",
    "SharedBudgetWarning",
    "SharedCacheWarning",
    "UnknownTokensWarning",
    "attach",
    "load_policy",
    "save_policy",
]
