"""Operators of vision models; none."""
