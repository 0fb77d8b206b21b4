"""One picture per op: how much of the roofline each provider reaches, by mode and size."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.kernels.cases import Result


def plot(results: list[Result], folder: Path, device: str) -> list[Path]:
    """Write ``<op>.svg`` into ``folder`` for every op in ``results``; returns the files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for op in dict.fromkeys(r.op for r in results):
        of_op = [r for r in results if r.op == op]
        cases = list(dict.fromkeys((r.sizes, r.dtype, r.mode) for r in of_op))
        names = list(dict.fromkeys(r.provider for r in of_op))
        figure, axes = pyplot.subplots(figsize=(9, 1 + 0.28 * len(cases) * len(names)))
        height = 0.8 / len(names)
        for n, name in enumerate(names):
            shares = {(r.sizes, r.dtype, r.mode): r.roofline for r in of_op if r.provider == name}
            places = [c + n * height for c, case in enumerate(cases) if case in shares]
            axes.barh(
                places, [shares[case] * 100 for case in cases if case in shares], height, label=name
            )
        axes.set_yticks([c + 0.4 - height / 2 for c in range(len(cases))])
        axes.set_yticklabels(
            [f"{mode} {dtype}\n{sizes}" for sizes, dtype, mode in cases], fontsize=7
        )
        axes.invert_yaxis()
        axes.set_xlabel("% of the roofline")
        axes.set_title(f"{op} on {device}")
        axes.legend(fontsize=7)
        figure.tight_layout()
        path = folder / f"{op}.svg"
        figure.savefig(path)
        pyplot.close(figure)
        written.append(path)
    return written
