"""Makes the pictures of README.md and docs/explanation: `make pictures`.

`dashboard.png` is the page of the first node of a real `p2ptrain demo`, photographed by Chromium while the swarm
trains. `loss_over_bytes.png` is drawn from the figures in benchmarks/figures/learning-0.8m.json, which
benchmarks/learning.py has made, and `loss_over_steps.png` from family-0.8m.json beside it, some of the runs that the
program keeps with --json. DiLoCo and MuLoCo in the first picture are from there as well: one seed, and our codec.
`lateness.png` is drawn from lateness.json, which benchmarks/lateness.py has made, and `distro.png` from distro.json:
runs of `distro` and AdamW that benchmarks/learning.py has kept, with their curves. `poison.png` is drawn from
poison.json, which benchmarks/poison.py has made.

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
FIGURES, FAMILY, LATENESS, DISTRO, POISON = (
    ROOT / "benchmarks" / "figures" / f"{name}.json"
    for name in ("learning-0.8m", "family-0.8m", "lateness", "distro", "poison")
)
OURS = ["k=64, 10 steps", "k=128, 10 steps", "k=256, 10 steps", "k=512, 8 steps"]  # the points of our line
DILOCO = "local adamw, all weights, 16 bits, 30 steps, decay 0, momentum 0.9, outer rate 0.7"
MULOCO = "local muon, all weights, 2 bits, 30 steps, decay 0.9, momentum 0.6, outer rate 0.7"
LABELS = {  # other methods: name, colour, and where the name stands, in points from the method's own
    "adamw, full synchronisation": ("AdamW, all gradients in fp32", "tab:red", (-62, 8)),
    "muon, full synchronisation": ("Muon, all gradients in fp32", "tab:purple", (-60, 6)),
    "sparseloco, 10 steps": ("SparseLoCo, AdamW", "tab:green", (0, 8)),
    DILOCO: ("DiLoCo, AdamW", "tab:brown", (0, 8)),
    MULOCO: ("MuLoCo", "tab:orange", (28, -4)),
}
HIGHEST = 1.0  # loss in the picture of lateness: one point, of 2.6, lies beyond
NODES, ROUNDS = 4, 150  # on the page when the picture is taken
SCREEN = {"width": 1_200, "height": 1_180}
PALETTE = 96  # colours of the page: a flat one needs no more, and weighs a third
OF_PLOTS = 32
START_SECONDS, MINUTES = 300.0, 15.0
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def main() -> None:
    """Draw what the arguments name, or all."""
    wanted = sys.argv[1:] or ["dashboard", "loss"]
    PICTURES.mkdir(exist_ok=True)
    if "loss" in wanted:
        loss_over_bytes(PICTURES / "loss_over_bytes.png")
        loss_over_steps(PICTURES / "loss_over_steps.png")
        lateness(PICTURES / "lateness.png")
        distro(PICTURES / "distro.png")
        poison(PICTURES / "poison.png")
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


def with_few_colours(path: Path, colours: int = PALETTE) -> None:
    from PIL import Image  # noqa: PLC0415  (matplotlib brings it)

    with Image.open(path) as image:
        image.convert("RGB").quantize(colours).save(path, optimize=True)


# ---------------------------------------------------------------------------------------------------
# The loss


def loss_over_bytes(path: Path) -> None:
    """Draw the loss of each method in LABELS over the bytes of a contribution a step, with its name beside it."""
    import matplotlib as mpl  # noqa: PLC0415  (slow, and only for this)

    mpl.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    rows = json.loads(FAMILY.read_text())["rows"] + json.loads(FIGURES.read_text())["rows"]
    points = {row["method"]: (row["bytes_per_peer_step"], row["loss"], row.get("deviation") or 0.0) for row in rows}
    figure, axes = pyplot.subplots(figsize=(8, 4.2), dpi=104, layout="constrained")
    ours = [points[f"local muon, {steps}, decay 0.95, starts with 1/4 of the residual, 4 peers"] for steps in OURS]
    sizes, losses, deviations = zip(*ours, strict=True)
    axes.errorbar(sizes, losses, deviations, color="tab:blue", marker="o", capsize=3, linewidth=2)
    for (size, loss, _), steps in zip(ours, OURS, strict=True):
        label = steps.split(",")[0]
        axes.annotate(label, (size, loss), (-24, -14), textcoords="offset points", color="tab:blue", ha="center")
    axes.text(sizes[0], 1.56, "p2ptrain, Muon: k of every 4,096 coefficients,\nonce in 8 or 10 steps", color="tab:blue")
    for method, (label, colour, place) in LABELS.items():
        size, loss, deviation = points[f"{method}, 4 peers"]
        axes.errorbar([size], [loss], [deviation], color=colour, marker="o", capsize=3)
        axes.annotate(label, (size, loss), place, textcoords="offset points", color=colour, ha="center")
        if "full" in method:
            axes.axhline(loss, color=colour, linestyle=":", linewidth=1)
    axes.set_xscale("log")
    axes.set(xlabel="bytes of a contribution for each step", ylabel="held-out loss, nats a byte", xlim=(600, 9e6))
    axes.set_ylim(1.28, 1.98)
    axes.set_title("820,352 parameters, 600 steps, 4 simulated peers", fontsize=10)
    axes.grid(visible=True, which="major", alpha=0.3)
    figure.savefig(path)
    pyplot.close(figure)
    with_few_colours(path, OF_PLOTS)


def loss_over_steps(path: Path) -> None:
    """Draw the validation loss of each member of the family while it trains, the lowest in the end first."""
    import matplotlib as mpl  # noqa: PLC0415  (slow, and only for this)

    mpl.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    colours = mpl.colormaps["tab20"].colors  # type: ignore[attr-defined]
    figure, axes = pyplot.subplots(figsize=(9, 5), dpi=110, layout="constrained")
    for place, row in enumerate(sorted(json.loads(FAMILY.read_text())["rows"], key=lambda row: row["curve"][-1][1])):
        steps, losses = zip(*row["curve"][1:], strict=True)
        label = f"{losses[-1]:.2f}  {row['method'].removesuffix(', 4 peers')}"
        style = ":" if "full" in label else "-" if place < 10 else "--"
        axes.plot(steps, losses, color=colours[2 * place % 20 + place // 10 % 2], linestyle=style, label=label)
    axes.set(xlabel="local steps", ylabel="validation loss, nats a byte", ylim=(1.3, 3.1), xlim=(0, 600))
    axes.legend(fontsize=6.5)
    axes.grid(alpha=0.3)
    figure.savefig(path)
    pyplot.close(figure)
    with_few_colours(path, OF_PLOTS)


def distro(path: Path) -> None:
    """Draw the loss of `distro` and of AdamW while they train, for each size of the model."""
    import matplotlib as mpl  # noqa: PLC0415  (slow, and only for this)

    mpl.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    rows = json.loads(DISTRO.read_text())["rows"]
    sizes = list(dict.fromkeys(row["parameters"] for row in rows))
    figure, panels = pyplot.subplots(1, len(sizes), figsize=(9, 3.8), dpi=110, layout="constrained")
    for axes, size in zip(panels, sizes, strict=True):
        for row in rows:
            if row["parameters"] == size:
                steps, losses = zip(*row["curve"][1:], strict=True)
                (line,) = axes.plot(steps, losses, marker="o", markersize=3)
                label = f"{row['name']}, {losses[-1]:.2f}\n{row['bytes_per_peer_step']:,.0f} bytes a step"
                place = (0, 28 if row["name"] == "distro" else -26)
                style = {"textcoords": "offset points", "ha": "right", "color": line.get_color()}
                axes.annotate(label, (steps[-1], losses[-1]), place, **style)
        axes.set(xlabel="steps", ylabel="validation loss, nats a byte", title=f"{size / 1e6:.1f} million parameters")
        axes.set_ylim(bottom=1.3)
        axes.grid(alpha=0.3)
    figure.savefig(path)
    pyplot.close(figure)
    with_few_colours(path, OF_PLOTS)


def poison(path: Path) -> None:
    """Draw what the worst lie does to the loss by each rule, for each number of liars, over the loss without them."""
    import matplotlib as mpl  # noqa: PLC0415  (slow, and only for this)

    mpl.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    rows = [row for row in json.loads(POISON.read_text())["rows"] if row["setting"]["steps"] == 200]
    absent = {(row["liars"], row["peers"]): row["loss"] for row in rows if not row["lie"]}
    lies = [row for row in rows if row["lie"] == "minus"]
    rules = list(dict.fromkeys(row["rule"] for row in lies))
    figure, axes = pyplot.subplots(figsize=(8, 3.4), dpi=110, layout="constrained")
    for liars, peers in sorted(absent):
        some = [row for row in lies if (row["liars"], row["peers"]) == (liars, peers)]
        ratios = [row["loss"] / absent[liars, peers] for row in some]
        places = [rules.index(row["rule"]) for row in some]
        axes.plot(places, ratios, "o", label=f"{liars} of {peers}")
    axes.set_xticks(range(len(rules)), [rule.replace("_", "\n") for rule in rules])
    axes.axhline(1.0, color="tab:gray", linewidth=1)
    axes.set(ylabel="held-out loss over that\nwithout the liars", yscale="log")
    axes.set_yticks(ticks := [1, 2, 5, 10, 20, 50], [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(path)
    pyplot.close(figure)
    with_few_colours(path, OF_PLOTS)


def lateness(path: Path) -> None:
    """Draw what contributions cost that are applied late, and beside it what peers of unequal numbers of steps cost."""
    import matplotlib as mpl  # noqa: PLC0415  (slow, and only for this)

    mpl.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.2), dpi=110, layout="constrained", width_ratios=(2, 1))
    rows = json.loads(LATENESS.read_text())["rows"]
    kinds: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in rows:
        if row["group"] == "late" and row["delay"]:
            kinds.setdefault((row["delay"], row["between"]), []).append(row)
    for (delay, between), some in kinds.items():
        label = f"{between} of ten steps late" if between else f"{delay} rounds late" if delay > 1 else "a round late"
        left.plot(
            [row["gap"] for row in some], [row["more_loss"] for row in some], marker="o", markersize=4, label=label
        )
        for row in some:
            if row["more_loss"] < HIGHEST:
                place = row["gap"], row["more_loss"]
                left.annotate(row["early_share"], place, (4, 3), textcoords="offset points", fontsize=7)
    left.set(xlabel="gap", ylabel="held-out loss beyond that without delay, nats a byte", ylim=(-0.02, HIGHEST))
    left.legend(fontsize=7)
    unequal = [row for row in rows if row["group"] == "unequal"]
    steps = ["/".join(map(str, row["steps_of"])) for row in unequal]
    right.plot(steps, [row["more_loss"] for row in unequal], marker="o")
    right.set(xlabel="steps of the four in a round", ylabel="beyond that of equal peers")
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.savefig(path)
    pyplot.close(figure)
    with_few_colours(path, OF_PLOTS)


if __name__ == "__main__":
    main()
