"""Paceline: keep Mixture-of-Experts models from waiting for their busiest expert."""

from importlib.metadata import version

from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy, PolicyError
from paceline.routing import Assignment, RoutingInputs, register_keep, route

__version__ = version("paceline")

__all__ = [
    "Assignment",
    "CapacityPolicy",
    "ExpertPlacement",
    "PolicyError",
    "RoutingInputs",
    "register_keep",
    "route",
]
