"""The Hugging Face Transformers engine: `attach` a capacity policy to a model in memory."""

from paceline.engines.transformers.attach import (
    LayerSupport,
    ModelStats,
    Pace,
    attach,
)
from paceline.engines.transformers.config import load_policy, save_policy
from paceline.engines.transformers.running import SharedBudgetWarning

__all__ = [
    "LayerSupport",
    "ModelStats",
    "Pace",
    "SharedBudgetWarning",
    "attach",
    "load_policy",
    "save_policy",
]
