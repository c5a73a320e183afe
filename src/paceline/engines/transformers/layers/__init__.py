"""MoE layers of a model: found, probed and routed."""
