"""The pictures of the examples' results. Training does not need them.

Each function saves one picture, and prints its path.
"""

import textwrap
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle


def _figure(height: float = 4.0) -> Figure:
    return Figure(figsize=(10, height), layout="constrained")


def _save(figure: Figure, path: str | Path) -> None:
    figure.savefig(path)
    print(f"picture: {Path(path).resolve()}")


def _sheet(ax: Axes, images, rows: int, **settings) -> None:
    """Draw 8 x 8 images in this many rows, with a margin around each."""
    columns = len(images) // rows
    tiles = np.reshape(images, (rows, columns, 8, 8))
    framed = np.pad(tiles, [(0, 0), (0, 0), (1, 1), (1, 1)]).swapaxes(1, 2)
    ax.imshow(framed.reshape(10 * rows, 10 * columns), cmap="gray_r", **settings)
    ax.axis("off")


def linear_regression(path, xs, ys, line, way, best) -> None:
    figure = _figure()
    left, right = figure.subplots(1, 2)
    left.scatter(xs, ys, s=6, color="0.6", label="data")
    left.plot(*line, "C0", linewidth=2, label="prediction")
    left.set(xlabel="x", ylabel="y")

    w, b = np.meshgrid(np.linspace(0.2, 2, 80), np.linspace(-0.8, 0.4, 80))
    losses = np.mean((w[..., None] * xs[:, 0] + b[..., None] - ys[:, 0]) ** 2, axis=-1)
    levels = np.geomspace(losses.min() * 1.05, losses.max(), 14)
    right.contour(w, b, losses, levels, colors="0.8", linewidths=0.8)
    right.plot(*way.T, "C0.-", label="gradient descent")
    right.plot(*best, "k*", markersize=12, label="least squares")
    right.set(xlabel="w", ylabel="b")
    for ax in (left, right):
        ax.legend()
    _save(figure, path)


def digits(path, losses, images, labels, guesses) -> None:
    figure = _figure()
    left, right = figure.subfigures(1, 2)
    axes = left.subplots()
    for seed, curve in losses.items():
        axes.semilogy(range(1, len(curve) + 1), curve, label=f"seed {seed}")
    axes.set(xlabel="epoch", ylabel="training loss")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend()
    right.suptitle("test digits and predictions; the wrong ones first")
    mistakes_first = np.argsort(guesses == labels, kind="stable")
    for i, ax in zip(mistakes_first, right.subplots(4, 6).flat, strict=False):
        ax.imshow(images[i, 0], cmap="gray_r")
        is_right = guesses[i] == labels[i]
        title = f"{guesses[i]}" if is_right else f"{guesses[i]}, not {labels[i]}"
        ax.set_title(title, color="k" if is_right else "r")
        ax.axis("off")
    _save(figure, path)


def vae(path, losses, baseline: float, images, guesses, samples) -> None:
    figure = _figure(4.2)
    left, right = figure.subfigures(1, 2)
    axes = left.subplots()
    for name, curve in losses.items():
        axes.plot(range(1, len(curve) + 1), curve, label=name)
    axes.axhline(baseline, color="0.5", linestyle="--", label="independent pixels")
    axes.set(xlabel="epoch", ylabel="nats per image", ylim=(None, 1.8 * baseline))
    axes.legend()
    pairs = np.concatenate([images[:12], guesses[:12], images[12:], guesses[12:]])
    sheets = {"test images, and below each its reconstruction": pairs}
    sheets["samples"] = samples
    for ax, (title, sheet) in zip(right.subplots(2, 1), sheets.items(), strict=True):
        _sheet(ax, sheet, rows=4, vmin=0, vmax=16)
        ax.set_title(title, size="medium")
    _save(figure, path)


def transformer(path, losses, every, baselines, text: str, weights, samples) -> None:
    figure = _figure(4.5)
    left, right = figure.subfigures(1, 2)
    axes = left.subplots()
    for name, curve in losses.items():
        axes.plot(every * np.arange(1, len(curve) + 1), curve, label=name)
    for (name, loss), style in zip(baselines.items(), [":", "--"], strict=True):
        axes.axhline(loss, color="0.5", linestyle=style, label=name)
    axes.set(xlabel="step", ylabel="nats per character")
    axes.legend()
    above, below = right.subfigures(2, 1, height_ratios=(3, 1))
    above.suptitle("where each block looks, from each row's character")
    for ax, heads in zip(above.subplots(1, len(weights)), weights, strict=True):
        ax.imshow(np.mean(heads, axis=0), cmap="Blues", vmin=0)
        ax.set_xticks(range(len(text)), text, family="monospace", fontsize=7)
        ax.set_yticks(range(len(text)), text, family="monospace", fontsize=7)
        ax.tick_params(length=0)
    below.suptitle("what it writes")
    written = "\n".join(sample.replace("\n", " ") for sample in samples)
    below.text(0.5, 0.75, written, ha="center", va="top", family="monospace", size=8)
    _save(figure, path)


def characters(path, every, curves, rates, baseline: float, written: str) -> None:
    figure = _figure(4.5)
    left, right = figure.subfigures(1, 2)
    losses, rate = left.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    steps = every * np.arange(1, len(rates) + 1)
    for name, curve in curves.items():
        losses.plot(steps, curve, label=name)
    losses.axhline(baseline, color="0.5", linestyle="--", label="bigrams")
    losses.set(ylabel="nats per held-out character")
    losses.legend()
    rate.step(steps, rates, where="pre", color="C2")
    rate.set(xlabel="step", ylabel="learning rate", ylim=(0, None))
    right.suptitle("what it writes")
    lines = textwrap.wrap(written, 56)[:16]
    right.text(0.02, 0.88, "\n".join(lines), va="top", family="monospace", size=8)
    _save(figure, path)


def rnn(path, accuracies, images, labels, probabilities) -> None:
    figure = _figure(3.6)
    left, right = figure.subfigures(1, 2, width_ratios=(2, 3))
    axes = left.subplots()
    axes.plot(range(1, len(accuracies) + 1), accuracies, "o-")
    axes.axhline(0.1, color="0.5", linestyle="--", label="chance")
    axes.set(xlabel="rows read", ylabel="test accuracy", ylim=(0, 1.02))
    axes.legend()
    right.suptitle("image, and the probability of each digit after each row")
    for i, ax in enumerate(right.subplots(2, 6).flat):
        picture = images[i // 2] if i % 2 == 0 else probabilities[i // 2]
        ax.imshow(picture, cmap=["gray_r", "Blues"][i % 2], vmin=0, vmax=1)
        ax.set_yticks([])
        ax.set_xticks([] if i % 2 == 0 else [labels[i // 2]])
    _save(figure, path)


def gan(path, real, samples, estimates) -> None:
    figure = _figure(3.4)
    *sheets, curve = figure.subplots(1, 3, width_ratios=[1, 1, 1.2])
    titled = {"real digits": real, "samples": samples}
    for ax, (title, images) in zip(sheets, titled.items(), strict=True):
        _sheet(ax, images[:64], rows=8, vmin=0, vmax=1)
        ax.set_title(title)
    width = max(len(estimates) // 50, 1)
    smooth = np.convolve(estimates, np.ones(width) / width, "valid")
    curve.plot(estimates, lw=0.5, alpha=0.4, color="C0")
    curve.plot(np.arange(len(smooth)) + width / 2, smooth, color="C0")
    curve.set(title="critic's estimate of the distance", xlabel="step", ylim=(0, None))
    _save(figure, path)


def ensemble(path, levels, of_ensemble, of_members, mean, variance, y) -> None:
    figure = _figure()
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.5])
    left.plot([0, 1], [0, 1], "k:", lw=1)
    left.plot(levels, of_members.T, color="C1", lw=0.7, alpha=0.6)
    left.plot([], [], color="C1", label="each member")
    left.plot(levels, of_ensemble, "o-", ms=4, color="C0", label="ensemble")
    left.set(xlabel="level of the interval", ylabel="true values in it", aspect="equal")
    left.legend()
    order = np.argsort(mean)[::5]
    mean, bars, y = mean[order], 1.645 * np.sqrt(variance[order]), y[order]
    places, label = range(len(order)), "prediction, 90 %"
    right.errorbar(places, mean, bars, fmt=".", lw=1, label=label)
    colors = np.where(np.abs(y - mean) > bars, "r", "k")
    right.scatter(places, y, s=9, c=colors, zorder=3, label="true")
    xlabel = "patients, in the order of the prediction"
    right.set(xlabel=xlabel, ylabel="progression of the disease")
    right.legend(loc="upper left")
    _save(figure, path)


def fine_tuning(path, curves, counts) -> None:
    figure = _figure(3.8)
    left, right = figure.subplots(1, 2, width_ratios=[1.6, 1])
    for name, curve in curves.items():
        left.plot(10 * np.arange(len(curve)), curve, label=name)
    left.set(xlabel="step", ylabel="test accuracy on the digits 5 to 9", ylim=(0.5, 1))
    left.legend(loc="lower right")
    colors = [f"C{i}" for i in range(len(counts))]
    bars = right.bar(list(counts), list(counts.values()), color=colors)
    right.bar_label(bars, [f"{count:,}" for count in counts.values()])
    right.set(ylabel="elements that are trained", yscale="log")
    right.margins(y=0.15)
    _save(figure, path)


def _sharding(ax: Axes, title: str, array) -> None:
    """Draw the part of the array that each device stores."""
    height, width = array.shape if array.ndim > 1 else (*array.shape, 8)
    pieces: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for shard in array.addressable_shards:
        index = (*shard.index, slice(None))[:2]
        sizes = zip(index, (height, width), strict=True)
        box = tuple(part.indices(size)[:2] for part, size in sizes)
        pieces.setdefault(box, []).append(shard.device.id)
    for i, (((top, bottom), (left, right)), ids) in enumerate(sorted(pieces.items())):
        color = f"C{i}" if len(pieces) > 1 else "0.85"
        corner, size = (left, top), (right - left, bottom - top)
        ax.add_patch(Rectangle(corner, *size, fc=color, ec="w", alpha=0.6))
        text = f"device {ids[0]}" if len(ids) == 1 else "whole, on\neach device"
        middle = (left + right) / 2, (top + bottom) / 2
        is_narrow = 3 * (right - left) < width
        angle = {"rotation": 90 if is_narrow else 0}
        ax.text(*middle, text, ha="center", va="center", fontsize=8, **angle)
    shape = " x ".join(map(str, array.shape))
    ax.set(xlim=(0, width), ylim=(height, 0), title=f"{title}\n{shape}")
    ax.set(xticks=[], yticks=[], aspect="auto")


def data_parallel(path, one, eight, arrays) -> None:
    figure = _figure()
    left, right = figure.subfigures(1, 2, width_ratios=[1.3, 1])
    top, bottom = left.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    top.semilogy(one, lw=3, alpha=0.4, label="one device")
    top.semilogy(eight, "k", lw=0.7, label="eight devices")
    top.set(ylabel="training loss")
    top.legend()
    bottom.plot(np.abs(eight - one), "k", lw=0.7)
    bottom.set(xlabel="step", ylabel="difference")
    bottom.ticklabel_format(axis="y", scilimits=(0, 0))
    axes = right.subplots(1, len(arrays))
    for ax, (title, array) in zip(axes, arrays.items(), strict=True):
        _sharding(ax, title, array)
    _save(figure, path)


def porting(path, same, similar) -> None:
    figure = _figure()
    left, right = figure.subplots(1, 2, sharey=True)
    for (name, losses), style in zip(same.items(), ("C0", "k:"), strict=True):
        left.semilogy(losses, style, lw=4 if style == "C0" else 1.2, label=name)
    for name, losses in similar.items():
        right.semilogy(losses, lw=0.8, label=name)
    left.set(title="the same computation", xlabel="step", ylabel="training loss")
    right.set(title="dropout masks of their own", xlabel="step")
    for axes in (left, right):
        axes.legend()
    _save(figure, path)


def gpt(path, losses, alone, baseline: float, samples, arrays) -> None:
    figure = _figure(4.5)
    left, right = figure.subfigures(1, 2)
    axes = left.subplots()
    axes.plot(alone, lw=4, alpha=0.4, label="one device, from the start")
    axes.plot(losses, "k", lw=0.7, label="eight devices, then one from their file")
    axes.axhline(baseline, color="0.5", linestyle="--", label="pairs of characters")
    axes.set(xlabel="step", ylabel="nats per character")
    axes.legend()
    above, below = right.subfigures(2, 1, height_ratios=(2, 1))
    above.suptitle("up, of one block: which device holds what")
    for ax, (title, array) in zip(above.subplots(1, 2), arrays.items(), strict=True):
        _sharding(ax, title, array)
    below.suptitle("what it writes")
    # After only a few steps, the model still writes characters that no font has.
    shown = (map(lambda c: c if c.isprintable() else " ", s) for s in samples)
    written = "\n".join(map("".join, shown))
    below.text(0.5, 0.7, written, ha="center", va="top", family="monospace", size=7)
    _save(figure, path)
