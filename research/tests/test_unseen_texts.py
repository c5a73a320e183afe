"""On text of kinds that they were not calibrated on, stand-ins lose less than dropping every
expert's rows does, and the runtime says that inputs are far.

The demo model, a small calibration on four of its domains; research/unseen_texts.py is the large
form. Per device, where dropping loses little there, they neither gain nor lose much: not tested.
"""

from __future__ import annotations

import statistics

import pytest

from paceline import CapacityPolicy, attach
from paceline.batches import Sampling, separate
from paceline.calibration.collect import calibrate
from paceline.demo.assets import held_out, load_model, read_text
from paceline.demo.settings import DEVICES
from paceline.evaluation.perplexity import change, run_policy

SEEN = ("c", "german", "html", "maths")


@pytest.mark.filterwarnings("ignore:.*share one budget:UserWarning")
def test_text_never_seen_loses_less_than_by_dropping_and_is_said_to_be_far() -> None:
    model, tokenizer = load_model()
    texts = {name: read_text(name) for name in SEEN}
    sampling = Sampling(2048 * len(SEEN), batch_size=8, sequence_length=256)
    found = calibrate(model, tokenizer, texts, sampling=sampling)
    parts = [part for part in held_out(tokenizer, 256, 4) if part.source not in SEEN]
    batches = separate(parts, 4)
    far = []
    with attach(model, None, DEVICES, calibration=found) as pace:
        base = run_policy(model, pace, None, batches, lambda: None).losses
        mean = {}
        for way in ("", ",compensate=true", ",compensate=true,keep=contribution"):
            policy = CapacityPolicy.parse(f"capacity_factor=1,unit=expert{way}")
            run = run_policy(model, pace, policy, batches, lambda: None)
            mean[way] = change(base, run.losses).mean
            far += [layer.stand_in_distance for layer in run.all_layers() if way]
    for way in list(mean)[1:]:
        assert mean[way] < 0.8 * mean[""], f"{way}: {mean}"
    # about 1 where inputs are like the calibration's
    assert statistics.fmean(far) > 1.5
