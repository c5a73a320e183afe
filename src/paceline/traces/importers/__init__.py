"""Routing that other programs wrote, one module a family of formats."""
