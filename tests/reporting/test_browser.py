"""Pages in a real browser (Debian's chromium): nothing cut, nothing tiny, no request."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli.app import app

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(BROWSER is None, reason="chromium is not installed (apt-get install it)"),
]
PRINTED = 703  # CSS pixels between the margins of A4
CASES = {"wide": (1300, 1, ""), "narrow": (420, 1, ""), "dark": (1300, 0, ""),
         "narrow and dark": (420, 0, ""), "print": (PRINTED, 1, "beforeprint")}  # fmt: skip
"""Width, preferred scheme (0: dark) and the event that is sent before the page is looked at."""

LOOK = """
<script>
setTimeout(() => {
  if ("%s") dispatchEvent(new Event("%s"));
  setTimeout(() => {
    const found = {outside: [], tiny: [], requests: [], background: ""};
    for (const card of document.querySelectorAll("section, .tile")) {
      const edge = card.getBoundingClientRect();
      for (const part of card.querySelectorAll("*")) {
        const box = part.getBoundingClientRect();
        const unseen = ".scroll, .hoverlayer, .draglayer, option, details:not([open])";
        if (!box.width || part.closest(unseen)) continue;
        if (box.left < edge.left - 1 || box.right > edge.right + 1)
          found.outside.push(
            `${part.tagName} ${part.textContent.slice(0, 60)}: ${box.left} to ${box.right}, ` +
            `outside of ${edge.left} to ${edge.right}`);
      }
    }
    for (const text of document.querySelectorAll("text, p, li, td, span, small, code")) {
      if (!text.textContent.trim() || !text.getBoundingClientRect().width) continue;
      const at = text.getScreenCTM ? text.getScreenCTM() : {a: 1, b: 0};
      const scale = Math.hypot(at.a, at.b);
      const size = parseFloat(getComputedStyle(text).fontSize) * scale;
      if (size < 10) found.tiny.push(size + " " + text.textContent.slice(0, 40));
    }
    for (const entry of performance.getEntriesByType("resource")) found.requests.push(entry.name);
    found.background = getComputedStyle(document.body).backgroundColor;
    found.plots = document.querySelectorAll(".js-plotly-plot .main-svg").length;
    parent.postMessage(JSON.stringify(found), "*");
  }, 1500);
}, 1500);
</script>
</body>"""

WRAP = """<body><pre id="found"></pre>
<iframe src="page.html" width="%d" height="2000" style="border: 0"></iframe>
<script>
addEventListener("message", event => document.getElementById("found").textContent = event.data);
</script></body>"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One page of each kind, made by the verbs."""
    folder = tmp_path_factory.mktemp("pages")
    runs = {
        "demo/index.html": ["demo", "--quick", "--out", "demo"],
        "loads.html": ["loads", "demo", "--tokens", "2048", "--policy", "capacity_factor=1"],
        "report.html": ["loads", "sample:esft_v2lite_law", "--batch-tokens", "512"],
        "swept/sweep.html": ["eval", "demo", "--grid", "--calibration", "demo", "--tokens", "1024",
                             "--factors", "1.5,1,0.5", "--out", "swept"],
        "tuned/ladder.html": ["tune", "demo", "--text", "prose", "--text", "c", "--tokens", "4096",
                              "--hardware", "h100", "--rank", "2", "--out", "tuned"],
        "bench.html": ["bench", "layer", "--shape", "tiny", "--tokens", "64", "--rounds", "2"],
    }  # fmt: skip
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, arguments in runs.items():
            more = [] if "/" in name else ["--html", name]
            ran = CliRunner().invoke(app, [*arguments, *more])
            assert ran.exit_code == 0, ran.output
            found[name] = (folder / name).read_text(encoding="utf-8")
    return found


def looked_at(page: str, case: str, folder: Path) -> dict[str, Any]:
    """What the page itself measures, in a frame of some width."""
    width, scheme, event = CASES[case]
    text = page.replace("</body>", LOOK % (event, event), 1)
    (folder / "page.html").write_text(text, encoding="utf-8")
    (folder / "wrap.html").write_text(WRAP % width, encoding="utf-8")
    assert BROWSER is not None
    ran = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files",
         f"--user-data-dir={folder / 'profile'}", f"--blink-settings=preferredColorScheme={scheme}",
         "--virtual-time-budget=20000", "--window-size=1400,2000", "--dump-dom",
         (folder / "wrap.html").as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    match = re.search(r'<pre id="found">(.+?)</pre>', ran.stdout, re.DOTALL)
    assert match, ran.stderr[-500:]
    return json.loads(html.unescape(match[1]))  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "name", ["demo/index.html", "loads.html", "report.html", "swept/sweep.html", "bench.html"]
)
def test_a_page_in_a_browser(name: str, case: str, pages: dict[str, str], tmp_path: Path) -> None:
    found = looked_at(pages[name], case, tmp_path)
    assert found["plots"]
    assert found["outside"] == []
    assert found["tiny"] == []
    assert [each for each in found["requests"] if not each.startswith("data:")] == []
    light = sum(map(int, re.findall(r"\d+", found["background"])[:3])) > 3 * 128
    assert light == ("dark" not in case)


def test_no_two_series_look_alike(pages: dict[str, str]) -> None:
    """Without colour too: by marker, dash or pattern."""
    for name, page in pages.items():
        figures = re.findall(r'class="figure-data" data-for="([\w-]+)">(.*?)</script>', page)
        assert figures, name
        for place, text in figures:
            looks = []
            for series in json.loads(html.unescape(text))["data"]:
                if series["type"] == "scatter" and "markers" in series["mode"]:
                    line = series.get("line", {})
                    looks.append((series["marker"].get("symbol", "circle"), line.get("dash")))
            assert len(set(looks)) == len(looks), (name, place, looks)


def test_headlines_are_short(pages: dict[str, str]) -> None:
    for name, page in pages.items():
        if match := re.search(r'<h1 id="headline">(.*?)</h1>', page):
            assert len(html.unescape(match[1]).split()) <= 15, (name, match[1])
