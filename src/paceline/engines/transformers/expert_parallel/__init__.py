"""Expert parallelism for Transformers; importing it registers `ep_implementation="paceline"`."""

from paceline.engines.transformers.expert_parallel.collectives import ExpertParallelError, join
from paceline.engines.transformers.expert_parallel.implementation import (
    NAME,
    ExpertParallel,
    PacelineEP,
    place_experts,
)

__all__ = ["NAME", "ExpertParallel", "ExpertParallelError", "PacelineEP", "join", "place_experts"]
