"""What a worker says once in its log, beside what it caps."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from paceline.engines.sharing import warn_of_shared_cache
from paceline.engines.vllm.savings import Experts

logger = logging.getLogger("vllm.paceline")

MUCH = 0.15
"""More than this has to be dropped to save time: worth a warning."""


def tell_what_is_saved(layers: Iterable[Experts | None]) -> None:
    """Where a cap may save nothing on this CPU but costs quality all the same.

    Args:
        layers: the experts of each; None: their dropped rows are always left out.
    """
    known = [experts for experts in layers if experts is not None]
    small = max(known, key=lambda experts: experts.share_that_pays, default=None)
    if small is not None and small.share_that_pays > MUCH:
        logger.warning(
            "paceline: experts of %d x %d are so small that leaving dropped rows out saves time "
            "on this CPU only where more than %.0f%% are dropped. Below that they are computed "
            "with weight 0: such a cap saves nothing here and changes what the model says; "
            "mode=shadow or observe counts without it.",
            small.hidden, small.width, 100 * small.share_that_pays,
        )  # fmt: skip


def tell_of_shared_cache() -> None:
    """That requests which share cached prefixes tell of each other under a cap."""
    warn_of_shared_cache("give each user a cache_salt, or say --no-enable-prefix-caching")
