"""Entry point of the group `vllm.general_plugins`: off unless the environment asks for a cap."""

from __future__ import annotations

import logging


def register() -> None:
    """Put the cap in, in every process of vLLM; twice is once.

    Raises:
        ValueError: if the environment asks for something that can't be.
        UnsupportedVllm: if this vLLM isn't one that the plugin was run with.
    """
    from paceline.engines.vllm.environment import wanted

    if wanted() is None:
        return
    from paceline.engines.vllm import signatures

    found = signatures.check()
    from paceline.engines.vllm import install

    if install.install():
        logging.getLogger("vllm.paceline").info("paceline in %s", found)
