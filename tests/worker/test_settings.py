"""Where a setting's value comes from, and what is refused."""

from pathlib import Path

import pytest

from topics.names import TopicNames
from worker.errors import SettingsError
from worker.setting_sources import Source, load_settings


def test_flags_win_over_environment_over_file_over_default(tmp_path: Path) -> None:
    """Each layer covers the ones below it, and every value tells its source."""
    file = tmp_path / "v4flash.toml"
    file.write_text('port = 1\nmetrics_port = 1\nhost = "file"\n')
    loaded = load_settings({"port": 3}, config=file, environ={"V4FLASH_PORT": "2", "V4FLASH_METRICS_PORT": "2"})
    settings = loaded.settings
    assert (settings.port, settings.metrics_port, settings.host, settings.group_id) == (3, 2, "file", "v4flash")
    sources = [loaded.sources[name] for name in ("port", "metrics_port", "host", "group_id")]
    assert sources == [Source.FLAG, Source.ENV, Source.FILE, Source.DEFAULT]


def test_an_unknown_variable_is_named() -> None:
    """A typing error in the environment never passes in silence."""
    with pytest.raises(SettingsError, match="V4FLASH_PROT"):
        load_settings(environ={"V4FLASH_PROT": "1"})


def test_variables_of_the_kernels_are_no_settings() -> None:
    """Who chooses an instruction set or a folder for compiled operations can still run a worker."""
    assert load_settings(environ={"V4FLASH_ISA": "v3", "V4FLASH_KERNEL_CACHE": "/cache"})


@pytest.mark.parametrize(("name", "value"), [("port", "no"), ("class_weights", "{"), ("num_blocks", "0")])
def test_a_bad_value_names_the_setting_and_its_source(name: str, value: str) -> None:
    """Values are refused, never replaced by a default."""
    with pytest.raises(SettingsError, match=rf"{name} \(from env\)"):
        load_settings(environ={f"V4FLASH_{name.upper()}": value})


def test_max_batch_size_is_another_name_of_max_num_seqs() -> None:
    """The alias works in every source."""
    assert load_settings(environ={"V4FLASH_MAX_BATCH_SIZE": "7"}).settings.max_num_seqs == 7


def test_a_password_is_never_shown() -> None:
    """`config show` masks secrets."""
    rows = load_settings(environ={"V4FLASH_SASL_PASSWORD": "hunter2"}).rows()
    assert "hunter2" not in repr(rows)


def test_routes_come_from_the_file_or_as_json_and_replace_the_default_ones(tmp_path: Path) -> None:
    """A pattern with a tenant; without any, one route for each class."""
    assert load_settings(environ={}).settings.route_table.topics == set(TopicNames().all_prompts)
    file = tmp_path / "v4flash.toml"
    file.write_text("[[routes]]\npattern = 'tenants[.](?P<tenant>[a-z]+)'\npriority = 'bulk'\n")
    from_file = load_settings(config=file, environ={}).settings.route_table
    from_flag = load_settings({"routes": '[{"topics": ["prompts"]}]'}, environ={}).settings.route_table
    assert from_file.match("tenants.acme").tenant == "acme"
    assert from_flag.topics == {"prompts"}


@pytest.mark.parametrize(
    "routes",
    [
        '[{"pattern": "("}]',
        '[{"topics": ["a"], "output_topic": "a"}]',
        r'[{"pattern": "v4flash[.].+"}]',
        "no json",
        "3",
    ],
)
def test_routes_that_cannot_be_used_are_refused_by_name(routes: str) -> None:
    """A broken expression, a loop, no JSON, no list."""
    with pytest.raises(SettingsError):
        load_settings({"routes": routes}, environ={})


def test_the_ssd_tier_needs_a_path_and_a_size_and_the_prefix_cache() -> None:
    """Half a configuration is refused with the name of the other half; without enable_l3_cache there is no tier."""
    assert load_settings(environ={}).settings.engine_config().cold is None
    for flags, missing in (
        ({}, "l3_cache_path"),
        ({"l3_cache_path": "/a", "swap_space": 0}, "swap_space"),
        ({"l3_cache_path": "/a", "enable_prefix_caching": False}, "enable_prefix_caching"),
    ):
        with pytest.raises(SettingsError, match=missing):
            load_settings({"enable_l3_cache": True, **flags}, environ={})
    cold = load_settings({"enable_l3_cache": True, "l3_cache_path": "/a,/b", "swap_space": 2}, environ={})
    config = cold.settings.engine_config().cold
    assert config is not None
    assert (config.directories, config.capacity_bytes) == ((Path("/a"), Path("/b")), 2 * 2**30)


def test_what_the_scheduler_keeps_back_follows_from_the_sizes_unless_it_is_said() -> None:
    """One slot and one block in 32 for urgent prompts, half of the stall limit for a step; 0 keeps nothing back."""
    flags = {"max_num_seqs": 64, "num_blocks": 4096, "streaming_timeout_ms": 3000}
    config = load_settings(flags, environ={}).settings.engine_config()
    assert (config.urgent_reserved_seqs, config.urgent_reserved_blocks) == (2, 128)
    assert config.inter_token_target_seconds == 1.5
    assert config.thermal is not None and config.thermal.limit_celsius == 85
    none = {"urgent_reserved_seqs": 0, "urgent_reserved_blocks": 0, "enable_thermal_governor": False}
    said = load_settings(none, environ={}).settings.engine_config()
    assert (said.urgent_reserved_seqs, said.urgent_reserved_blocks, said.thermal) == (0, 0, None)
