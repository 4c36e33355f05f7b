"""The switches of the vLLM plugin; they need no vLLM. Everything else is in tests/vllm."""

import pytest

from arctic_platform.errors import ConfigError
from arctic_platform.rl.config import ArcticRLClientConfig
from arctic_platform.rl.zorro_inference import vllm_plugin
from arctic_platform.rl.zorro_inference.vllm_plugin import call_cost, check_version, is_on, register


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu"])
def test_known_versions_pass(version):
    check_version(version)


@pytest.mark.parametrize("version", ["0.31.0", "0.32.1", "0.33.0", "1.0.0rc1"])
def test_other_versions_are_refused_by_name(version):
    with pytest.raises(ConfigError, match=f"knows vLLM 0.32.0, installed is {version}"):
        check_version(version)


def test_it_is_off_unless_asked_for(monkeypatch):
    monkeypatch.delenv(vllm_plugin.SWITCH, raising=False)
    register()
    assert not is_on({})
    assert is_on({vllm_plugin.ENGINE_SWITCH: True})
    monkeypatch.setenv(vllm_plugin.SWITCH, "1")
    assert is_on({})
    assert not is_on({vllm_plugin.ENGINE_SWITCH: False})


@pytest.mark.parametrize("value", ["yes", "true", "2"])
def test_a_switch_that_is_neither_on_nor_off_is_refused(monkeypatch, value):
    monkeypatch.setenv(vllm_plugin.SWITCH, value)
    with pytest.raises(ConfigError, match="neither 1"):
        register()


def test_the_cost_of_a_call_comes_from_the_engine_then_the_environment_then_the_default(monkeypatch):
    monkeypatch.delenv(vllm_plugin.COST_SWITCH, raising=False)
    assert call_cost({}, 512) == 512
    monkeypatch.setenv(vllm_plugin.COST_SWITCH, "64")
    assert call_cost({}, 512) == 64
    assert call_cost({vllm_plugin.ENGINE_COST: 8}, 512) == 8
    for value in ("0", "much"):
        monkeypatch.setenv(vllm_plugin.COST_SWITCH, value)
        with pytest.raises(ConfigError, match="1 or more"):
            call_cost({}, 512)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"vllm": {"max_model_len": 64}}, "vllm has no effect with sampling_engine='torch'"),
        ({"vllm_timeout": 3.0}, "vllm_timeout has no effect"),
        ({"zorro_inference": {"vllm_fca": True}}, "vllm_fca has no effect"),
        ({"sampling_engine": "vllm", "dtype": "float64"}, "no float64"),
        ({"sampling_engine": "vllm", "zorro_inference": {"vllm_fca_call_cost": 5}}, "no effect without vllm_fca"),
        ({"sampling_engine": "vllm", "zorro_inference": {"vllm_fca": True, "enable": False}}, "needs enable=true"),
        ({"sampling_engine": "vllm", "device": "cuda:1"}, "CUDA_VISIBLE_DEVICES"),
        ({"sampling_engine": "sglang"}, "sampling_engine"),
    ],
)
def test_settings_that_cannot_take_effect_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        ArcticRLClientConfig(model="tiny-random", **settings)


def test_without_vllm_the_extra_is_named():
    pytest.importorskip("torch")
    from arctic_platform.errors import MissingDependencyError
    from arctic_platform.rl.server.backend import create_backend

    try:
        import vllm  # noqa: F401
    except ImportError:
        with pytest.raises(MissingDependencyError, match=r"zorro-rl\[vllm\]"):
            create_backend(ArcticRLClientConfig(model="tiny-random", sampling_engine="vllm"))
