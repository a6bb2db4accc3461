"""The plot of a calibration; needs matplotlib, which the package does not."""

from pathlib import Path
from typing import Any


def plot(path: Path, result: dict[str, Any]) -> None:
    """Write a PNG: the similarity of layers as a map, their filter abilities as a line.

    Args:
        path: Where the PNG is written.
        result: What ``calibrate`` writes.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    layers, filters = result["layers"], result["filters"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    shares = [[100 * share if share else float("nan") for share in row] for row in result["kept"]]
    image = left.imshow(shares, origin="lower", vmin=0, vmax=100)
    figure.colorbar(image, ax=left, label="attention kept, %")
    left.set_xticks(range(len(layers)), layers, fontsize=6)
    left.set_yticks(range(len(layers)), layers, fontsize=6)
    left.set_xlabel("layer that attends")
    left.set_ylabel("layer that selects")
    abilities = {int(layer): 100 * share for layer, share in result["abilities"].items()}
    right.plot(list(abilities), list(abilities.values()), "o-", markersize=4)
    chosen = [abilities[layer] for layer in filters]
    right.plot(filters, chosen, "rs", label=f"filters: {', '.join(map(str, filters))}")
    right.set_xlabel("layer that selects")
    right.set_ylabel("attention of later layers kept, % (mean)")
    right.set_ylim(0, 100)
    right.grid(alpha=0.3)
    right.legend(fontsize=8)
    settings = result["settings"]
    figure.suptitle(
        f"{result['model']}: {settings['selected']} tokens selected of up to {settings['tokens']}"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
