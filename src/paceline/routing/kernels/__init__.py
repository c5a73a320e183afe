"""Backends of the selection, one module each; `paceline.routing.selection` chooses among them."""
