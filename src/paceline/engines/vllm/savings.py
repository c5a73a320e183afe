"""Where a CPU gains by leaving dropped rows out, and where that costs more than it saves.

The kernel knows no id to skip, so that leaving rows out means one row a kept (token, expert) pair:
inputs are gathered, and what the pairs give is added up. That costs a pair about as much time as so
many columns of its expert's width, whatever the hidden size, since both grow with it.
"""

from __future__ import annotations

from dataclasses import dataclass

PAIR_COST = {"amx": 200, "vec": 64}
"""Kernel -> columns of an expert's width that take as long as gathering a pair and adding it up.
Where the two ways are equal, benchmarks/vllm_kernel.py measured 45 to 90 in float32 (vec) and 80 to
260 in bfloat16 (amx), with experts of width 64 to 1,024 on one core of a Xeon."""

LITTLE_WORK = 1 << 23
"""Multiply-adds of a matrix that a layer's experts do in half a millisecond or so: below it neither
way matters, and what is computed may as well be what is counted."""


@dataclass(frozen=True)
class Experts:
    """The experts of a layer as a CPU's kernel runs them.

    Attributes:
        hidden: size of a token.
        width: of an expert in this process.
        isa: vLLM's name of the kernel.

    >>> Experts(512, 1024).skipping_pays(dropped=1000, assignments=8192)
    True
    >>> Experts(192, 64).skipping_pays(dropped=1000, assignments=8192)
    False
    """

    hidden: int
    width: int
    isa: str = "vec"

    @property
    def pair_cost(self) -> int:
        """See `PAIR_COST`; of a kernel that was never measured, as of the one without AMX."""
        return PAIR_COST.get(self.isa, PAIR_COST["vec"])

    @property
    def share_that_pays(self) -> float:
        """The dropped share from which leaving rows out saves time.

        >>> round(Experts(512, 1024).share_that_pays, 3)
        0.059
        """
        return self.pair_cost / (self.pair_cost + self.width)

    def skipping_pays(self, dropped: int, assignments: int) -> bool:
        """Whether the kernel is quicker, or hardly slower, on the kept pairs alone.

        Args:
            dropped: of the assignments.
            assignments: of a forward's tokens.
        """
        if assignments * self.hidden * self.width <= LITTLE_WORK:
            return True
        return dropped * self.width > (assignments - dropped) * self.pair_cost
