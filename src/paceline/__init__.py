"""Paceline: keep Mixture-of-Experts models from waiting for their busiest expert."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.engines.transformers import Pace, attach
    from paceline.placement import ExpertPlacement
    from paceline.plan import Plan
    from paceline.policy import CapacityPolicy
    from paceline.policy_text import PolicyError
    from paceline.routing import Assignment, RoutingInputs, register_keep, route

__version__ = version("paceline")

_HOME = {
    "Assignment": "paceline.routing",
    "CapacityPolicy": "paceline.policy",
    "ExpertPlacement": "paceline.placement",
    "Pace": "paceline.engines.transformers",
    "Plan": "paceline.plan",
    "PolicyError": "paceline.policy_text",
    "RoutingInputs": "paceline.routing",
    "attach": "paceline.engines.transformers",
    "register_keep": "paceline.routing",
    "route": "paceline.routing",
}

__all__ = [
    "Assignment",
    "CapacityPolicy",
    "ExpertPlacement",
    "Pace",
    "Plan",
    "PolicyError",
    "RoutingInputs",
    "attach",
    "register_keep",
    "route",
]


def __getattr__(name: str) -> Any:
    """Import on first use: torch takes seconds, which `paceline --help` need not wait for."""
    if name not in _HOME:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    try:
        return getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("transformers", "safetensors"):
            raise
        raise ImportError(
            f"paceline.{name} needs {error.name}: pip install 'paceline[transformers]'."
        ) from error


def __dir__() -> list[str]:
    return [*globals(), *_HOME]
