"""The table of the benchmarks of control."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples/benchmarks"))
from control import compare, ratio


def test_a_ratio_above_one_means_that_ours_is_better():
    assert ratio([20.0, 30.0, 60.0], [10.0, 10.0, 10.0], more_is_better=True) == 3
    assert ratio([2.0, 2.0, 4.0], [4.0, 10.0, 4.0], more_is_better=False) == 2
    inf = float("inf")
    assert ratio([2.0], [inf], more_is_better=False) == inf and ratio([inf], [inf], more_is_better=False) == 1


def test_rows_hold_medians_of_pairs_and_failures():
    def runs(*speeds):
        return [{"error": "not installed: python is missing"} if x is None else {"sps": x, "rss_mb": 100.0}
                for x in speeds]  # fmt: skip

    speed, memory = compare(
        "fast", "train", ours=runs(40, 60, 50), theirs=runs(20, 10, None), peer="sb3", floor={"train": 100.0}
    )
    assert (speed["suite"], speed["case"], speed["unit"], speed["peer_name"]) == (
        "control",
        "fast train",
        "steps/s",
        "sb3",
    )
    assert (speed["ours"], speed["peer"], speed["ratio"], speed["pairs"]) == (50, 15, 4, 2)
    assert speed["floor_share"] == 0.5 and speed["note"].startswith("not installed")
    assert memory["case"] == "fast train memory" and memory["ratio"] == 1 and memory["floor_share"] is None
    absent = compare("zoo", "solve", ours=[{"solve_s": None}], theirs=runs(None), peer="skrl", floor=None)[0]
    assert absent["ratio"] is absent["ours"] is None and absent["note"]
