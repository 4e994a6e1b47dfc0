"""The parameter counts add up to what DeepSeek publishes."""

from __future__ import annotations

import pytest
from plan_cases import FLASH, PRO, first_layers

from dsv4kit.plan.counted import geometry as geo
from dsv4kit.plan.counted.rollout import kv_bytes_per_token


def test_pro_has_1600_billion_parameters_of_which_49_are_active():
    sums = geo.totals(PRO)
    assert sums.with_mtp / 1e12 == pytest.approx(1.6, abs=0.05)
    assert round(sums.active / 1e9) == 49
    assert sums.main == 1_572_997_179_491


def test_flash_has_284_billion_parameters_of_which_13_are_active():
    sums = geo.totals(FLASH)
    assert round(sums.main / 1e9) == 284
    assert round(sums.active / 1e9) == 13


def test_released_weights_of_pro_are_865_gb():
    assert geo.totals(PRO).released_with_mtp_bytes / 1e9 == pytest.approx(865, abs=0.5)


def test_flash_export_is_156_gb():
    assert geo.totals(FLASH).released_bytes / 1e9 == pytest.approx(156, abs=0.5)


def test_a_proxy_of_four_layers_weighs_55_gib_quantised():
    """`du -h` showed 56G for such a checkpoint: it rounds up."""
    proxy = geo.totals(first_layers(PRO, 4))
    assert proxy.released_bytes / 2**30 == pytest.approx(55.2, abs=0.1)
    assert 2 * proxy.main / 1e9 == pytest.approx(209.7, abs=0.1)


def test_kv_cache_of_a_million_tokens_of_pro_is_9_62_gib_in_bf16():
    assert kv_bytes_per_token(PRO, 2) * 2**20 / 2**30 == pytest.approx(9.62, abs=0.01)
    assert kv_bytes_per_token(PRO, 1) == pytest.approx(5511, abs=1)
    assert kv_bytes_per_token(FLASH, 1) == pytest.approx(3850, abs=1)


@pytest.mark.parametrize(
    ("model", "ratio", "millions"),
    [(PRO, geo.CSA, 401.50), (PRO, geo.HCA, 377.50), (FLASH, geo.SWA, 133.97), (FLASH, geo.CSA, 153.11)],
)
def test_dense_part_of_a_layer(model, ratio, millions):
    assert geo.layer_dense_params(model, ratio) / 1e6 == pytest.approx(millions, abs=0.01)


def test_experts_are_nearly_everything():
    share = PRO.num_layers * geo.layer_expert_params(PRO) / geo.totals(PRO).main
    assert share == pytest.approx(0.984, abs=0.001)


def test_every_layer_of_the_shipped_models_has_a_compression_ratio():
    for model, kinds in ((PRO, (0, 30, 31)), (FLASH, (2, 21, 20))):
        assert len(model.compress_ratios) == model.num_layers + model.mtp_layers
        assert tuple(model.layer_ratios.count(kind) for kind in (geo.SWA, geo.CSA, geo.HCA)) == kinds
