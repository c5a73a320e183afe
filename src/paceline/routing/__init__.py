"""The algorithm on tensors: what is kept where, as one pure function."""

from paceline.routing.assignment import Assignment
from paceline.routing.inputs import RoutingInputs
from paceline.routing.ranking import register_keep
from paceline.routing.route import route

__all__ = ["Assignment", "RoutingInputs", "register_keep", "route"]
