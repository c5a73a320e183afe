"""Engines: thin layers that let a serving stack route through `paceline.route`."""
