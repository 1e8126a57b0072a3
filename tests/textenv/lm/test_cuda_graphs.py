"""The widths at which steps are captured; graphs themselves need CUDA (tests/helpers/device_runs.py: "decoding")."""

from textenv.lm.cuda_graphs import rounded_up


def test_widths_are_rounded_up_by_hand():
    by_hand = {1: 64, 64: 64, 65: 128, 320: 320, 321: 384, 511: 512, 513: 640, 1024: 1024, 1025: 1280, 4097: 5120}
    assert {width: rounded_up(width) for width in by_hand} == by_hand


def test_a_long_text_has_few_widths_and_few_keys_in_vain():
    widths = range(1, 32_769)
    assert len({rounded_up(width) for width in widths}) <= 32
    assert all(width <= rounded_up(width) < 1.25 * width + 64 for width in widths)
