"""vLLM's next version, from its wheel's Python sources: has it all that the plugin depends on?

Needs no kernels and no GPU. It doesn't show that the plugin works there, only that no part which it
calls by name is gone; a part that is missing is named.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

NEXT = "0.33.0"
CHECK = """
import sys
import vllm
assert vllm.__version__.split("+")[0] == sys.argv[1], vllm.__version__
from paceline.engines.serving.versions import missing_part
from paceline.engines.vllm.plugin import NEEDED
print("missing:", missing_part(NEEDED))
import paceline.engines.vllm.vllm_model, paceline.engines.vllm.patches
from importlib import import_module
from paceline.engines.vllm.runners import SKIPS_NEGATIVE_IDS
experts = {"TritonExperts": "triton_moe", "MarlinExperts": "marlin_moe"}
for name in SKIPS_NEGATIVE_IDS:
    module = import_module(f"vllm.model_executor.layers.fused_moe.experts.{experts[name]}")
    assert hasattr(module, name), name
print("imported")
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python files of the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
    ]
    ran = subprocess.run(
        [*command, f"vllm=={NEXT}"], capture_output=True, text=True, timeout=900, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if not wheels:
        pytest.skip(f"the wheel of vLLM {NEXT} can't be had: {ran.stderr.strip()[-200:]}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        for name in wheel.namelist():
            if name.endswith(".py"):
                wheel.extract(name, folder / "sources")
    wheels[0].unlink()
    return folder / "sources"


def check(sources: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(sources), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", CHECK, NEXT], capture_output=True, text=True, timeout=600,
        check=False, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


@pytest.mark.long
def test_the_next_version_has_all_that_the_plugin_needs(sources: Path) -> None:
    ran = check(sources)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "missing: None" in ran.stdout
    assert "imported" in ran.stdout


@pytest.mark.long
def test_what_a_version_lacks_is_named(sources: Path) -> None:
    file = sources / "vllm/model_executor/layers/fused_moe/router/base_router.py"
    text = file.read_text(encoding="utf-8")
    try:
        file.write_text(text.replace("topk_indices_dtype", "indices_type"), encoding="utf-8")
        ran = check(sources)
    finally:
        file.write_text(text, encoding="utf-8")
    assert "parameter topk_indices_dtype of" in ran.stdout
    assert "BaseRouter._select_experts" in ran.stdout
