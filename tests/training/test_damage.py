"""Every flipped bit of the small files of a run is refused or without effect."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest

from hpctrain import plan_check
from hpctrain.config import Config, to_toml
from hpctrain.errors import UsageError
from hpctrain.plan import resolve
from hpctrain.plan_check import go_on
from hpctrain.training.folder import check_same, read_settings
from tests.runs.test_plan import FACTS
from tests.support.spoil import flip_each_bit

CONFIG = Config(data="flowers.h5", run="a", lr=0.017, momentum=0.875, flip=True, shards=4, seed=3)


@pytest.mark.parametrize("name", ["plan.json", "config.toml"])
def test_every_flipped_bit_is_refused_or_has_no_effect(tmp_path, monkeypatch, name):
    parse_toml = cache(plan_check.parse_toml)  # the other file's is slow
    monkeypatch.setattr(plan_check, "parse_toml", parse_toml)
    plan = resolve(CONFIG, FACTS)
    (tmp_path / "config.toml").write_text(to_toml(CONFIG))
    (tmp_path / "plan.json").write_text(plan.to_json() + "\n")
    facts = dataclasses.replace(FACTS, ranks=3)
    expected, without_effect = go_on(plan, CONFIG, facts), 0
    for place in flip_each_bit(tmp_path / name):
        try:
            before, found = read_settings(tmp_path)
            check_same(CONFIG, before, found, tmp_path)
        except UsageError as error:
            assert "\n" not in str(error)
            continue
        without_effect += 1
        assert go_on(found, CONFIG, facts) == expected, place
    size = 8 * (tmp_path / name).stat().st_size
    assert without_effect < size * {"plan.json": 0.1, "config.toml": 0.9}[name]
    assert read_settings(tmp_path) == (CONFIG, plan)
