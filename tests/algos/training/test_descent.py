"""`Optimizer`: its schedule by hand."""

import pytest
import torch

from algos.config import Config
from algos.optimizer import Optimizer


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {0.0: 1, 0.5: 1, 1.0: 1}),
        ({"final_learning_rate": 0.2}, {0.0: 1, 0.5: 0.6, 1.0: 0.2}),
        ({"warmup_ratio": 0.5}, {0.0: 0.01, 0.25: 0.5, 0.5: 1, 1.0: 1}),
        # Up to the full step size, and down over what is left.
        ({"warmup_ratio": 0.2, "final_learning_rate": 0.0}, {0.1: 0.5, 0.2: 1, 0.6: 0.5, 1.0: 0}),
        ({"warmup_ratio": 1.0, "final_learning_rate": 0.0}, {0.5: 0.5, 0.9: 0.9, 1.0: 1}),
    ],
)
def test_the_step_size_rises_to_where_it_starts_and_falls_to_its_end(options, expected):
    descent = Optimizer([torch.nn.Parameter(torch.ones(1))], Config(learning_rate=1.0, **options))
    for progress, rate in expected.items():
        descent.schedule(progress)
        assert descent.adam.param_groups[0]["lr"] == pytest.approx(rate)
