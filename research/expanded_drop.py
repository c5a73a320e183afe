"""Reasons why Expanded Drop helps in the paper and hardly here: one ingredient at a time.

Held-out texts, batches of 4,096 tokens of one text, 8 emulated devices, mean perplexity change.

    python research/expanded_drop.py --out research/results/expanded_drop.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline import CapacityPolicy, attach
from paceline.batches import separate
from paceline.cli.output import progress
from paceline.demo.assets import held_out, load_model
from paceline.demo.settings import DEVICES
from paceline.evaluation.perplexity import change, run_policy
from paceline.files import to_json, write_text
from paceline.system_info import system_info

POLICIES = (
    # extras without a drop: what a further expert does by itself
    "capacity_factor=50,expand=all,expand_limit=1,fill_to=50",
    # the paper's unit, where much is lost
    "capacity_factor=1,unit=expert",
    "capacity_factor=1,unit=expert,renormalize=true",
    "capacity_factor=1,unit=expert,expand=own_device",
    "capacity_factor=1,unit=expert,expand=all",
    "capacity_factor=1,unit=expert,expand=all,max_experts=4",
    "capacity_factor=1,unit=expert,expand=all,expand_rule=compete",
    "capacity_factor=1.5,unit=expert",
    "capacity_factor=1.5,unit=expert,expand=own_device",
    "capacity_factor=1.5,unit=expert,expand=all",
    "capacity_factor=1.5,unit=expert,expand=all,max_experts=4",
    # devices, where little is lost
    "capacity_factor=1",
    "capacity_factor=1,expand=all,max_experts=4",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sequences", type=int, default=16, help="of 256 tokens, of each text")
    given = parser.parse_args()
    model, tokenizer = load_model()
    batches = separate(held_out(tokenizer, 256, given.sequences), 16)
    rows, done = [], 0
    total = (1 + len(POLICIES)) * len(batches)
    with progress() as tell, attach(model, None, DEVICES, token_source="sequence") as pace:

        def step() -> None:
            nonlocal done
            done += 1
            tell(done, total, "batches judged")

        base = run_policy(model, pace, None, batches, step).losses
        for text in POLICIES:
            run = run_policy(model, pace, CapacityPolicy.parse(text), batches, step)
            after, shares = change(base, run.losses), run.shares()
            print(f"{text}: {100 * after.mean:+.3f}%", flush=True)
            rows.append(
                {
                    "policy": text,
                    "perplexity_change": after.to_dict(),
                    **shares.drops(),
                    "expert_peak_to_mean": shares.expert_peak_to_mean,
                }
            )
    data = {
        "schema": "paceline-expanded-drop/1",
        "model": "demo",
        "devices": DEVICES,
        "judged_tokens": sum(batch.ids.numel() for batch in batches),
        "results": rows,
        **system_info(),
    }
    write_text(given.out, to_json(data), private=False)


if __name__ == "__main__":
    main()
