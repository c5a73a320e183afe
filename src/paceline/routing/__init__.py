"""Routing: a pure function on tensors that assigns tokens to experts within capacities."""

from paceline.routing.assignment import Assignment
from paceline.routing.inputs import RoutingInputs
from paceline.routing.ranking import register_keep
from paceline.routing.route import route

__all__ = ["Assignment", "RoutingInputs", "register_keep", "route"]
