"""Makes the pictures of README.md and docs/explanation/recipes.md: `make pictures`.

`dashboard.png` is the page of the first node of a real `p2ptrain demo`, photographed by Chromium while the swarm
trains. `loss_over_bytes.png` is drawn from benchmarks/figures/learning.json, the figures of benchmarks/learning.py, and
`loss_over_steps.png` from benchmarks/figures/family-0.8m.json, some of the runs that it keeps with --json.

    python docs/pictures.py [dashboard] [loss]
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
FIGURES, FAMILY = (ROOT / "benchmarks" / "figures" / name for name in ("learning.json", "family-0.8m.json"))
NODES, ROUNDS = 4, 150  # on the page when the picture is taken
SCREEN = {"width": 1_200, "height": 1_180}
PALETTE = 128  # colours of the picture: a flat page needs no more, and weighs a third
START_SECONDS, MINUTES = 300.0, 15.0
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def main() -> None:
    """Draw what the arguments name, or all."""
    wanted = sys.argv[1:] or ["dashboard", "loss"]
    PICTURES.mkdir(exist_ok=True)
    if "loss" in wanted:
        loss_over_bytes(PICTURES / "loss_over_bytes.png")
        loss_over_steps(PICTURES / "loss_over_steps.png")
    if "dashboard" in wanted:
        dashboard(PICTURES / "dashboard.png")
    for picture in sorted(PICTURES.glob("*.png")):
        print(f"{picture.relative_to(ROOT)}: {picture.stat().st_size:,} bytes")


# ---------------------------------------------------------------------------------------------------
# The dashboard


def dashboard(path: Path) -> None:
    """Run a demo, and photograph the first node's page when the swarm has trained for a while."""
    with tempfile.TemporaryDirectory(prefix="p2ptrain-pictures-") as folder:
        command = [sys.executable, "-m", "p2ptrain", "demo", "--nodes", str(NODES), "--rounds", str(10 * ROUNDS)]
        demo = subprocess.Popen([*command, "--keep", folder], stdout=subprocess.DEVNULL)
        try:
            status = _until_trained(demo, Path(folder) / "node1")
            photograph(status["http"], path)
        finally:
            demo.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                demo.wait(60)
            if demo.poll() is None:
                demo.kill()


def _until_trained(demo: subprocess.Popen[bytes], directory: Path) -> dict[str, Any]:
    """The first node's status once all are members and enough rounds are applied."""
    began = monotonic()
    while monotonic() - began < 60.0 * MINUTES:
        if demo.poll() is not None:
            raise SystemExit(f"the demo has ended with status {demo.returncode}")
        asked = subprocess.run(
            [sys.executable, "-m", "p2ptrain", "status", "--json", "--data-dir", str(directory)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        status: dict[str, Any] = json.loads(asked.stdout) if asked.returncode == 0 else {}
        if status.get("applied_round", 0) >= ROUNDS and len(status["roster"]) == NODES:
            return status
        if not status and monotonic() - began > START_SECONDS:
            raise SystemExit("the first node does not answer")
        sleep(3.0)
    raise SystemExit(f"not {ROUNDS} rounds within {MINUTES:.0f} minutes")


def photograph(url: str, path: Path) -> None:
    """Save a picture of a page whose charts are drawn, with few colours."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415  (the plots take no browser)

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_context(viewport=SCREEN, color_scheme="light", locale="en-GB", timezone_id="UTC").new_page()
        page.goto(url)
        page.wait_for_function("document.getElementById('main').dataset.round !== undefined", timeout=60_000)
        page.wait_for_selector(".plotly .main-svg", timeout=60_000)
        page.wait_for_timeout(3_000)  # plotly draws the charts one after the other
        page.screenshot(path=path)
        browser.close()
    with_few_colours(path)


def with_few_colours(path: Path) -> None:
    from PIL import Image  # noqa: PLC0415  (matplotlib brings it)

    with Image.open(path) as image:
        image.convert("RGB").quantize(PALETTE).save(path, optimize=True)


# ---------------------------------------------------------------------------------------------------
# Loss over bytes


def loss_over_bytes(path: Path) -> None:
    """Draw each method's validation loss over what one peer uploads a step."""
    import matplotlib as mpl  # noqa: PLC0415  (slow, and only for this)

    mpl.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    colours = mpl.colormaps["tab20"].colors  # type: ignore[attr-defined]
    rows = json.loads(FIGURES.read_text())
    figure, axes = pyplot.subplots(figsize=(8, 4.4), dpi=110, layout="constrained")
    families: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["family"].endswith(", 4 peers") and "late" not in row["family"]:
            families.setdefault(row["family"].removesuffix(", 4 peers"), []).append(row)
    for place, (family, points) in enumerate(sorted(families.items())):
        if family.startswith("full"):
            lowest = min(row["loss"] for row in points)
            label = (
                f"{points[0]['method'].split(',')[0]} with full synchronisation, {4 * points[0]['parameters']:,} bytes"
            )
            axes.axhline(lowest, color=colours[2 * place % 20 + place // 10], linestyle=":", label=label)
            continue
        points.sort(key=lambda row: row["bytes_per_peer_step"])
        sizes, losses = [row["bytes_per_peer_step"] for row in points], [row["loss"] for row in points]
        bars = [row["deviation"] or 0.0 for row in points]
        axes.errorbar(
            sizes,
            losses,
            bars,
            color=colours[2 * place % 20 + place // 10],
            marker="o",
            capsize=3,
            linestyle="",
            label=family,
        )
        if family == "local muon":
            best = [row for row in points if row["loss"] <= min(losses[: points.index(row) + 1])]
            axes.plot(
                [row["bytes_per_peer_step"] for row in best],
                [row["loss"] for row in best],
                color=colours[2 * place % 20 + place // 10],
            )
    axes.set_xscale("log")
    axes.set_xlabel("bytes that a peer uploads for each step")
    axes.set_ylabel("held-out loss, nats a byte")
    axes.set_title(f"{rows[0]['parameters']:,} parameters, {rows[0]['steps']} steps, 4 simulated peers", fontsize=9)
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(fontsize=7, ncols=2)
    figure.savefig(path, pil_kwargs={"optimize": True})
    pyplot.close(figure)


def loss_over_steps(path: Path) -> None:
    """Draw the validation loss of each member of the family while it trains, the lowest in the end first."""
    import matplotlib as mpl  # noqa: PLC0415  (slow, and only for this)

    mpl.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    colours = mpl.colormaps["tab20"].colors  # type: ignore[attr-defined]
    figure, axes = pyplot.subplots(figsize=(9, 5), dpi=110, layout="constrained")
    for place, row in enumerate(sorted(json.loads(FAMILY.read_text()), key=lambda row: row["curve"][-1][1])):
        steps, losses = zip(*row["curve"][1:], strict=True)
        label = f"{losses[-1]:.2f}  {row['method'].removesuffix(', 4 peers')}"
        style = ":" if "full" in label else "-" if place < 10 else "--"
        axes.plot(steps, losses, color=colours[2 * place % 20 + place // 10 % 2], linestyle=style, label=label)
    axes.set(xlabel="local steps", ylabel="validation loss, nats a byte", ylim=(1.3, 3.1), xlim=(0, 600))
    axes.legend(fontsize=6.5)
    axes.grid(alpha=0.3)
    figure.savefig(path)
    pyplot.close(figure)
    with_few_colours(path)


if __name__ == "__main__":
    main()
