"""Write the pictures of Sanctum for the documentation, and the screens that the tests expect.

python scripts/make_screenshots.py [--run RUN]   # docs/images/*.svg, of RUN or a new training
python scripts/make_screenshots.py --expected    # tests/karn/sanctum/screens/*.txt
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

from esper.karn.sanctum.app import PAGES, Sanctum
from esper.simic.training.vectorized import train_ppo_vectorized

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
TESTS = ROOT / "tests"
SIZES = ((80, 24), (160, 50))
WIDTH, HEIGHT = 140, 40
DEMO: dict[str, Any] = {
    "name": "demo",
    "task": "digits_shift",
    "envs": 16,
    "rounds": 13,
    "telemetry_level": "debug",
    "seed": 42,
}


async def picture(run: Path, target: Path, keys: list[str], light: bool = False) -> None:
    """Write one page of a run as SVG."""
    app = Sanctum(run, light)
    async with app.run_test(size=(WIDTH, HEIGHT)) as pilot:
        while not app.at_end:
            await pilot.pause(0.05)
        for key in keys:
            await pilot.press(key)
            await pilot.pause(0.1)
        await pilot.pause(0.3)
        target.write_text(app.export_screenshot(title="esper sanctum"), encoding="utf-8")


def pictures(run: Path) -> None:
    """Write the pictures of the documentation. A past moment shows the run while it grows."""
    IMAGES.mkdir(exist_ok=True)
    past = ["less_than_sign", *["comma"] * 20]
    for name, keys, light in (
        ("overview", ["1", "s", "s", *past], False),
        ("policy", ["2"], False),
        ("environment", ["5", "enter"], False),
        ("scoreboard", ["5"], True),
    ):
        asyncio.run(picture(run, IMAGES / f"sanctum-{name}.svg", keys, light))


def expected() -> None:
    """Write the screens of the recorded runs."""
    sys.path.insert(0, str(TESTS))
    from karn.sanctum.screen import RECORDED, shown

    folder = TESTS / "karn" / "sanctum" / "screens"
    folder.mkdir(exist_ok=True)
    for kind in ("healthy", "anomalous"):
        for number, page in enumerate(PAGES, 1):
            for size in SIZES:
                lines = shown(RECORDED / kind, str(number), size=size)
                name = f"{kind}-{page.title}-{size[0]}x{size[1]}.txt"
                (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Write the pictures or the expected screens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, help="show this run instead of a new training")
    parser.add_argument("--expected", action="store_true", help="write what the tests expect")
    arguments = parser.parse_args()
    if arguments.expected:
        expected()
    elif arguments.run is not None:
        pictures(arguments.run)
    else:
        with tempfile.TemporaryDirectory() as folder:
            pictures(train_ppo_vectorized(telemetry_dir=folder, **DEMO).path)


if __name__ == "__main__":
    main()
