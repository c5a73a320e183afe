"""Timings of a MoE layer and of whole models under several policies, emulated or on real ranks."""
