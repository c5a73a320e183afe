"""Routing that other programs wrote, one module per family of formats."""
