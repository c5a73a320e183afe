"""Run SGLang's engine once: settings as JSON on standard input, tokens as JSON in a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

SETTINGS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "mem_fraction_static": 0.2,
    "max_total_tokens": 4096,
    "skip_tokenizer_init": True,
    "log_level": "info",
}
"""With which SGLang runs without an accelerator and without its own kernels for CPUs."""

if __name__ == "__main__":
    import sglang

    asked = json.load(sys.stdin)
    engine = sglang.Engine(model_path=asked["model"], **SETTINGS | asked["settings"])
    sampling = {"temperature": 0.0, "max_new_tokens": asked["new_tokens"], "ignore_eos": True}
    answers = [
        engine.generate(input_ids=batch, sampling_params=sampling, return_logprob=True)
        for batch in asked["batches"]
    ]
    tokens = [[answer["output_ids"] for answer in batch] for batch in answers]
    values = [
        [[step[0] for step in answer["meta_info"]["output_token_logprobs"]] for answer in batch]
        for batch in answers
    ]
    Path(asked["out"]).write_text(json.dumps([tokens, values]))
    engine.shutdown()
