"""A browser draws every plot of the report in light and dark mode, at several widths."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from numpy.typing import NDArray

from esper.karn.report import write_report
from processes import WATCHDOG

RECORDED = Path(__file__).parents[1] / "recorded"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
DESK, PHONE = 1300, 500
"""Widths in pixels; a browser's window is not narrower than the second."""

SCHEMES = {"dark": 0, "light": 1}
PAGE_COLOURS = {"dark": (0x14, 0x14, 0x13), "light": (0xF6, 0xF6, 0xF3)}
INK = {"dark": (0xEC, 0xEB, 0xE4), "light": (0x1C, 0x1C, 0x1A)}

MEASURE = """<script>
const box = e => { const r = e.getBoundingClientRect();
                   return [r.left, r.top + scrollY, r.right, r.bottom + scrollY]; };
document.title = JSON.stringify({
  width: innerWidth, needed: document.documentElement.scrollWidth,
  height: document.documentElement.scrollHeight,
  plots: [...document.querySelectorAll("svg")].map(svg => ({
    title: svg.querySelector("title").textContent, box: box(svg),
    words: [...svg.querySelectorAll("text")].map(text => [text.textContent, box(text)])}))});
</script></body>"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not any(map(shutil.which, BROWSERS)), reason=f"no browser: none of {', '.join(BROWSERS)}"
    ),
]


def browse(place: Path, page: Path, *arguments: str) -> str:
    """Open ``page`` in a headless browser; return what it prints."""
    program = next(found for name in BROWSERS if (found := shutil.which(name)))
    usual = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
    command = [program, *usual, f"--user-data-dir={place / 'profile'}", *arguments]
    done = subprocess.run(
        [*command, page.as_uri()], capture_output=True, text=True, timeout=WATCHDOG, check=True
    )
    return done.stdout


def layout(place: Path, page: Path, width: int) -> dict:
    """Return where the browser places the plots and their text."""
    measured = place / "measured.html"
    measured.write_text(page.read_text().replace("</body>", MEASURE))
    text = browse(place, measured, f"--window-size={width},900", "--dump-dom")
    title = re.search(r"<title>(\{.*?)</title>", text, re.DOTALL)
    assert title
    return json.loads(title[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


def screenshot(place: Path, page: Path, width: int, height: int, scheme: str) -> NDArray:
    """Return the page as pixels, uint8 ``[height, width, 3]``."""
    picture = place / "page.png"
    browse(
        place, page, f"--window-size={width},{height}", f"--screenshot={picture}",
        f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
    )  # fmt: skip
    return (255 * imread(picture)[..., :3]).round().astype(np.uint8)


@pytest.fixture(scope="module", params=["healthy", "all"])
def page(request: pytest.FixtureRequest, tmp_path_factory) -> Path:
    kinds = [request.param] if request.param != "all" else sorted(RECORDED.glob("*/"))
    runs = [RECORDED / kind for kind in kinds if (RECORDED / kind / "config.json").exists()]
    return write_report(runs, tmp_path_factory.mktemp("page") / "report.html")


@pytest.mark.parametrize("scheme", list(SCHEMES))
def test_every_plot_is_drawn_in_light_and_dark_mode(tmp_path, page: Path, scheme: str) -> None:
    found = layout(tmp_path, page, DESK)
    pixels = screenshot(tmp_path, page, DESK, found["height"], scheme)
    assert tuple(pixels[2, 2]) == PAGE_COLOURS[scheme]
    assert len(found["plots"]) >= 15
    for plot in found["plots"]:
        left, top, right, bottom = (round(edge) for edge in plot["box"])
        part = pixels[top:bottom, left:right].reshape(-1, 3)
        background = np.median(part, axis=0)
        shown = np.abs(part - background).max(1) > 40
        assert shown.mean() > 0.005, f"next to nothing is seen of {plot['title']}"
        coloured = np.ptp(part.astype(int), axis=1) > 60
        assert coloured.sum() > 50, f"no curve is seen in {plot['title']}"
    ink = np.abs(pixels.astype(int) - INK[scheme]).max(2) < 12
    assert ink[:200].any(), "the title is seen"


@pytest.mark.parametrize("width", [DESK, PHONE])
def test_nothing_is_cut_off_at_any_width(tmp_path: Path, page: Path, width: int) -> None:
    found = layout(tmp_path, page, width)
    assert found["needed"] <= found["width"], "the page itself never scrolls sideways"
    for plot in found["plots"]:
        left, top, right, bottom = plot["box"]
        for text, (a, b, c, d) in plot["words"]:
            inside = left - 1 <= a and c <= right + 1 and top - 1 <= b and d <= bottom + 1
            assert inside, f"{text!r} sticks out of {plot['title']}"


def test_the_page_prints(tmp_path: Path, page: Path) -> None:
    target = tmp_path / "page.pdf"
    browse(tmp_path, page, f"--print-to-pdf={target}", "--no-pdf-header-footer")
    assert len(re.findall(rb"/Type\s*/Page\b", target.read_bytes())) >= 2
