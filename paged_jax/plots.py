"""Pictures of a run: pool occupancy, the block map, waste, the prefix cache and preemptions, over its dispatches.

matplotlib is imported on first use. Colours are those of Okabe and Ito, which colour-blind readers can tell apart.
"""

from typing import TYPE_CHECKING

import numpy as np

from paged_jax.recorder import CACHED, FREE, SHARED, Recorder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BLUE, _SKY, _ORANGE, _RED, _GREEN = "#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#009E73"
_FREE_COLOUR, _CACHED_COLOUR, _SHARED_COLOUR = "#FFFFFF", "#C9C9C9", "#000000"
#: Requests take these in turn.
_REQUEST_COLOURS = (_BLUE, _ORANGE, _GREEN, "#CC79A7", _SKY, _RED, "#F0E442")


def plot_steps(recorder: Recorder, block_size: int) -> "Figure":
    """A figure of all that a recorder holds; save it with `figure.savefig(path)`.

    Args:
        recorder: with at least one dispatch; the block map is drawn if it has block maps.
        block_size: tokens per block.

    Raises:
        ValueError: nothing was recorded.
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'paged_jax[plot]'") from error
    if not recorder.records:
        raise ValueError("the recorder is empty; attach it (llm.recorder = Recorder()) before requests run")
    columns = _columns(recorder)
    columns["num_slots"] = columns["num_used_blocks"] * block_size
    panels = [(_draw_occupancy, 2.0), (_draw_waste, 1.2), (_draw_prompt_tokens, 1.2), (_draw_requests, 1.4)]
    if recorder.block_maps:
        columns["owners"] = np.stack(recorder.block_maps)
        panels.insert(1, (_draw_block_map, 3.4))
    heights = [height for _, height in panels]
    figure = Figure(figsize=(10, 1.3 + 1.25 * sum(heights)), layout="constrained")
    all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (draw, _) in zip(all_axes, panels, strict=True):
        draw(axes, columns)
        axes.set_xlim(0, len(recorder.records))
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0, frameon=False)
    all_axes[-1].set_xlabel("dispatch")
    return figure


def _columns(recorder: Recorder) -> dict[str, np.ndarray]:
    """One array [dispatches] per numeric field of the records."""
    names = [name for name, value in vars(recorder.records[0]).items() if not isinstance(value, str)]
    return {name: np.array([getattr(record, name) for record in recorder.records]) for name in names}


def _staircase(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x and y of a staircase: value i from i to i + 1."""
    return np.arange(len(values) + 1), np.append(values, values[-1])


def _draw_occupancy(axes: "Axes", columns: dict[str, np.ndarray]) -> None:
    from matplotlib.ticker import MaxNLocator

    used, cached = columns["num_used_blocks"], columns["num_cached_blocks"]
    free = columns["num_free_blocks"] - cached
    x, _ = _staircase(used)
    layers = [_staircase(layer)[1] for layer in (used, cached, free)]
    labels, colours = ["in use", "free, cached", "free"], [_BLUE, _SKY, "#E5E5E5"]
    axes.stackplot(x, *layers, labels=labels, colors=colours, step="post", lw=0)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(0, max(1, int((used + columns["num_free_blocks"]).max())))
    axes.set_ylabel("blocks")
    axes.set_title("Pool occupancy", loc="left")


def _draw_block_map(axes: "Axes", columns: dict[str, np.ndarray]) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    owners = columns["owners"].T  # [blocks, dispatches]
    special = {FREE: 0, CACHED: 1, SHARED: 2}
    colour = len(special) + owners % len(_REQUEST_COLOURS)
    for value, index in special.items():
        colour[owners == value] = index
    palette = ListedColormap([_FREE_COLOUR, _CACHED_COLOUR, _SHARED_COLOUR, *_REQUEST_COLOURS])
    num_blocks, num_steps = owners.shape
    axes.imshow(
        colour,
        cmap=palette,
        vmin=-0.5,
        vmax=palette.N - 0.5,
        aspect="auto",
        interpolation="nearest",
        origin="lower",
        extent=(0, num_steps, 0.5, num_blocks + 0.5),
    )
    axes.set_ylabel("block")
    axes.set_title("Who owns each block (requests take the colours in turn)", loc="left")
    requests = [Patch(color=c, label=f"request {i}, {i + 7}, ...") for i, c in enumerate(_REQUEST_COLOURS)]
    axes.legend(
        handles=[
            *requests,
            Patch(color=_SHARED_COLOUR, label="shared"),
            Patch(color=_CACHED_COLOUR, label="free, cached"),
            Patch(facecolor=_FREE_COLOUR, edgecolor="#808080", label="free"),
        ],
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        borderaxespad=0.0,
        frameon=False,
    )


def _draw_waste(axes: "Axes", columns: dict[str, np.ndarray]) -> None:
    waste = 100 * (1 - columns["num_stored_tokens"] / np.maximum(1, columns["num_slots"]))
    waste = np.where(columns["num_slots"] > 0, waste, np.nan)  # nothing is wasted of nothing
    axes.step(*_staircase(waste), where="post", color=_RED)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("%")
    axes.set_title("Waste: slots of used blocks that hold no token", loc="left")


def _draw_prompt_tokens(axes: "Axes", columns: dict[str, np.ndarray]) -> None:
    computed, hits = columns["num_prompt_tokens"], columns["prefix_hits"]
    x = np.arange(len(hits)) + 0.5
    axes.bar(x, computed, width=1.0, color=_BLUE, label="computed")
    axes.bar(x, hits, bottom=computed, width=1.0, color=_ORANGE, label="found in cache")
    axes.set_ylabel("tokens")
    axes.set_title("Prompt tokens", loc="left")


def _draw_requests(axes: "Axes", columns: dict[str, np.ndarray]) -> None:
    from matplotlib.ticker import MaxNLocator

    for name, label, colour, style in (
        ("num_running", "running", _BLUE, "-"),
        ("num_waiting", "waiting", _ORANGE, "--"),
        ("num_swapped", "swapped out", _GREEN, ":"),
    ):
        axes.step(*_staircase(columns[name]), where="post", label=label, color=colour, linestyle=style)
    for name, label, marker, colour in (
        ("num_preemptions_recompute", "preemption, recompute", "v", _RED),
        ("num_preemptions_swap", "preemption, swap", "s", "#CC79A7"),
    ):
        where = np.flatnonzero(columns[name])
        axes.plot(where + 0.5, columns["num_running"][where], marker, color=colour, label=label, markersize=5)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("requests")
    axes.set_title("Requests", loc="left")
