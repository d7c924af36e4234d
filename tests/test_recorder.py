"""Recorder, block maps made by hand, and the picture of them."""

import sys

import numpy as np
import pytest
from test_metrics import record

from paged_jax import Recorder, build_block_map, plot_steps


def test_recorder_when_full_drops_the_oldest():
    recorder = Recorder(max_steps=2)
    for step in range(4):
        recorder.on_step(record(num_steps=step))
    assert [r.num_steps for r in recorder.records] == [2, 3]
    assert len(recorder.block_maps) == 0


@pytest.mark.parametrize("wanted", [False, True])
def test_recorder_with_and_without_block_maps_refuses_the_other(wanted):
    with pytest.raises(ValueError, match="block_maps"):
        Recorder(block_maps=wanted).on_step(record(), None if wanted else np.zeros(3))


def test_recorder_of_no_steps_is_refused():
    with pytest.raises(ValueError, match="max_steps"):
        Recorder(max_steps=0)


def test_block_map_shows_owner_shared_cached_and_free_blocks():
    block_ids = np.zeros((1, 4, 3), np.int32)
    block_ids[0, 1] = [2, 3, 0]
    block_ids[0, 3] = [2, 5, 0]
    ref_count = np.array([0, 0, 2, 1, 0, 1, 0])
    content_uid = np.array([0, 0, 9, 0, 8, 0, 0])
    got = build_block_map(block_ids, ref_count, content_uid, {1: 7, 3: 4})
    assert got.tolist() == [-1, -3, 7, -2, 4, -1]
    assert got.dtype == np.int32


def steps(*, block_maps: bool) -> Recorder:
    recorder = Recorder(block_maps=block_maps)
    for used in (0, 2, 3):
        owners = np.array([5] * used + [-3, -2, -1], np.int32)[:5]
        counts = {"num_used_blocks": used, "num_free_blocks": 5 - used, "num_stored_tokens": 3 * used}
        event = {"num_preemptions_swap": int(used == 3), "num_running": used, "num_prompt_tokens": 4, "prefix_hits": 2}
        recorder.on_step(record(**counts, **event), np.resize(owners, 5) if block_maps else None)
    return recorder


def drawn_colours(axes) -> np.ndarray:
    return axes.images[0].get_array().T


def test_plot_draws_what_was_recorded(tmp_path):
    figure = plot_steps(steps(block_maps=True), block_size=4)
    occupancy, block_map, waste, prompt_tokens, requests = figure.axes
    assert [text.get_text() for text in occupancy.get_legend().get_texts()] == ["in use", "free, cached", "free"]
    assert occupancy.get_ylim() == (0, 5)
    assert drawn_colours(block_map).shape == (3, 5)
    # Free, cached and shared are colours 0, 1 and 2; request 5 has the 6th of the others.
    assert drawn_colours(block_map)[1].tolist() == [8, 8, 2, 1, 0]
    np.testing.assert_allclose(waste.lines[0].get_ydata(), [np.nan, 25, 25, 25])
    assert [bar.get_height() for bar in prompt_tokens.patches] == [4, 4, 4, 2, 2, 2]
    assert [line.get_xdata().tolist() for line in requests.lines[3:]] == [[], [2.5]]
    path = tmp_path / "steps.png"
    figure.savefig(path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_plot_without_block_maps_has_no_block_map():
    assert len(plot_steps(steps(block_maps=False), block_size=4).axes) == 4


def test_plot_of_nothing_or_without_matplotlib_says_what_to_do(monkeypatch):
    with pytest.raises(ValueError, match=r"llm\.recorder = Recorder\(\)"):
        plot_steps(Recorder(), block_size=4)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'paged_jax\[plot\]'"):
        plot_steps(steps(block_maps=False), block_size=4)
