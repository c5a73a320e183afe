"""The Hugging Face Transformers engine: `attach` a capacity policy to a model in memory."""

from paceline.engines.transformers.attach import (
    LayerSupport,
    ModelStats,
    Pace,
    SharedBudgetWarning,
    attach,
)
from paceline.engines.transformers.config import load_policy, save_policy

__all__ = [
    "LayerSupport",
    "ModelStats",
    "Pace",
    "SharedBudgetWarning",
    "attach",
    "load_policy",
    "save_policy",
]
