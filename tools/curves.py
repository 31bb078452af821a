"""The curves of plan.py --plot: GB on a GPU and ms per step of each strategy, over the number of GPUs."""

from matplotlib.figure import Figure


def draw(tables, file):
    """Write an SVG of {GPUS: rows, the fastest first}; of the meshes that fit it shows the fastest."""
    curves = {}
    for gpus, rows in tables.items():
        for row in rows:
            alone = row["tensor"] * row["pipeline"] == 1
            points = curves.setdefault(row["strategy"] if alone else "fastest t x p x d", {})
            if row["fits"]:
                points.setdefault(gpus, (row["bytes"]["sum"] / 1e9, row["ms"]["sum"]))
    figure = Figure(figsize=(10, 4), layout="constrained")
    for i, pane in enumerate(figure.subplots(1, 2)):
        for name, points in curves.items():
            if points:
                pane.plot(points.keys(), [point[i] for point in points.values()], marker=".", label=name)
        pane.set(xlabel="GPUs", ylabel=("GB on a GPU", "ms per step")[i])
        pane.set_xscale("log", base=2)
        pane.set_ylim(bottom=0)
    pane.legend()
    figure.savefig(file, format="svg")
