"""All settings of a worker: names, types, defaults, and what fits together. Built once, frozen; where the values come
from is `worker.setting_sources`' to know."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from engine.api import PriorityClass
from engine.cache.cold_admission import ColdAdmission
from engine.cache.spec import KVDtypeChoice
from engine.config import ColdConfig, EngineConfig
from engine.thermal import ThermalPolicy
from topics.names import TopicNames
from topics.routes import Route, RouteTable
from worker.backpressure import DEFAULT_THRESHOLDS, Backpressure, Thresholds
from worker.dead_letter import Dialect, Values
from worker.processes import SUPERVISED
from worker.quotas import TenantQuota
from worker.security import check_security
from worker.setting_forms import json_like, names, values_by_tenant

ENV_PREFIX = "V4FLASH_"
CONFIG_VARIABLE = "V4FLASH_CONFIG"
NO_SETTINGS = frozenset({CONFIG_VARIABLE, SUPERVISED, "V4FLASH_ISA", "V4FLASH_KERNEL_CACHE"})
"""Variables of the machine's, not of the worker's: which file, and how operations are compiled."""
ALIASES = {"max_batch_size": "max_num_seqs", "served_model_name": "served_model_names"}


RESERVED_PART = 32
"""One slot and one block in so many are kept for urgent requests, where the settings do not say how many."""


Ratio = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Celsius = Annotated[float, Field(gt=0, le=150, allow_inf_nan=False)]
ModelName = Annotated[str, Field(min_length=1, max_length=256)]
Port = Annotated[int, Field(ge=0, le=65535)]
ByClass = Annotated[dict[PriorityClass, Ratio], json_like('{"urgent": 0.98, "standard": 0.92, "bulk": 0.85}')]


class Settings(BaseSettings):
    """Frozen settings. Units are in the names; port 0 takes a free port. Raises ValidationError when built by hand."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", env_prefix=ENV_PREFIX, protected_namespaces=())

    model_dir: Path | None = None
    served_model_names: Annotated[tuple[ModelName, ...], BeforeValidator(names)] = ()
    engine: Literal["model", "scripted"] = "model"
    scripted_tokens_per_second: Rate = 200.0
    dtype: Literal["bf16", "fp32", "int8"] = "bf16"
    exact_modules: Annotated[tuple[str, ...], BeforeValidator(names)] = ("lm_head", "o_proj")
    few_rows_layout: bool = True
    seed: int = 0

    bootstrap_servers: str = "127.0.0.1:9092"
    group_id: str = "v4flash"
    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")] = "v4flash"
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"] = "PLAIN"
    sasl_username: str | None = None
    sasl_password: SecretStr | None = None
    sasl_oauth_token_file: Path | None = None
    sasl_oauth_token_provider: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] | None = None
    tls_ca_file: Path | None = None
    tls_certificate_file: Path | None = None
    tls_key_file: Path | None = None
    tls_key_password: SecretStr | None = None
    session_timeout_seconds: Seconds = 30.0
    from_beginning: bool = False
    max_replay_age_seconds: Seconds = 86_400.0
    reply_prefixes: Annotated[tuple[str, ...], BeforeValidator(names)] = ()
    routes: Annotated[tuple[Route, ...], json_like('[{"topics": ["prompts"], "priority": "bulk"}]')] = ()

    host: str = "127.0.0.1"
    port: Port = 8080
    metrics_port: Port = 9100
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "json", "console"] = "auto"
    flight_recorder_dir: Path | None = None
    disable_log_requests: bool = False
    disable_log_stats: bool = False

    max_body_bytes: Count = 4 * 1024 * 1024
    max_output_tokens: Count = 1024
    max_inflight_requests: Count = 128
    max_inflight_per_partition: Count = 32
    class_weights: Annotated[dict[PriorityClass, Rate], json_like('{"urgent": 8, "standard": 4, "bulk": 1}')] = Field(
        default_factory=lambda: {PriorityClass.URGENT: 8.0, PriorityClass.STANDARD: 4.0, PriorityClass.BULK: 1.0}
    )
    backpressure_pause: ByClass = Field(
        default_factory=lambda: {cls: limits.pause_at for cls, limits in DEFAULT_THRESHOLDS.items()}
    )
    backpressure_resume: ByClass = Field(
        default_factory=lambda: {cls: limits.resume_at for cls, limits in DEFAULT_THRESHOLDS.items()}
    )
    backpressure_dwell_seconds: Seconds = 0.5
    grace_seconds: Seconds = 30.0
    restart_after_seconds: Seconds | None = None
    restart_memory_growth_bytes: Count | None = None
    lease_seconds: Seconds = 60.0
    alone_after: Count = 2
    quarantine_after: Count = 3
    dead_letter_dialect: Dialect = "connect"
    tenant_quotas: Annotated[
        dict[str, TenantQuota], json_like('{"acme": {"requests_per_second": 5}, "*": {"concurrent_tokens": 20000}}')
    ] = Field(default_factory=dict)
    dead_letter_values: Annotated[dict[str, Values], BeforeValidator(values_by_tenant)] = Field(default_factory=dict)

    streaming_timeout_ms: Count = 4000
    first_token_timeout_ms: Count = 60_000
    stream_coalesce_ms: Annotated[int, Field(ge=0)] = 20
    stream_coalesce_tokens: Count = 8
    progress_heartbeat_seconds: Seconds = 5.0
    reply_give_up_seconds: Seconds = 60.0

    block_size: Count = 16
    num_blocks: Count = 2048
    kv_cache_memory_gib: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    kv_cache_dtype: KVDtypeChoice = "auto"
    kv_cache_group_size: Count = 64
    max_num_seqs: Count = 64
    max_num_batched_tokens: Count = 1024
    max_model_len: Count = 2048
    prefill_chunk_size: Count = 512
    prefill_chunk_hook: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] | None = None
    inter_token_target_ms: Count | None = None
    enable_interrupts: bool = True
    enable_thermal_governor: bool = True
    thermal_warn_celsius: Celsius = 78.0
    thermal_limit_celsius: Celsius = 85.0
    urgent_reserved_seqs: Annotated[int, Field(ge=0)] | None = None
    urgent_reserved_blocks: Annotated[int, Field(ge=0)] | None = None
    enable_prefix_caching: bool = True
    enable_l3_cache: bool = False
    l3_cache_path: Annotated[tuple[Path, ...], BeforeValidator(names)] = ()
    swap_space: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 4.0
    l3_admission: ColdAdmission = ColdAdmission.ROOM
    l3_compression: Literal["none", "zstd"] = "none"

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        for name in ("class_weights", "backpressure_pause", "backpressure_resume"):
            if set(getattr(self, name)) != set(PriorityClass):
                raise ValueError(f"{name} needs a value for each of {', '.join(PriorityClass)}")
        Backpressure(self.thresholds, dwell_seconds=self.backpressure_dwell_seconds)
        self.engine_config()
        self.route_table.check_names(self.names)
        check_security(self)
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what is handed in: `load_settings` layers the sources, so that each value's origin is known."""
        return (init_settings,)

    @property
    def names(self) -> TopicNames:
        return TopicNames(self.prefix)

    @property
    def route_table(self) -> RouteTable:
        """The `routes`, or one for each service class below `prefix`."""
        return RouteTable(routes=self.routes) if self.routes else RouteTable.default(self.names)

    @property
    def allowed_reply_prefixes(self) -> tuple[str, ...]:
        """`reply_prefixes`, or the default allow-list below `prefix`."""
        return self.reply_prefixes or self.names.reply_prefixes

    @property
    def thresholds(self) -> dict[PriorityClass, Thresholds]:
        return {cls: Thresholds(self.backpressure_pause[cls], self.backpressure_resume[cls]) for cls in PriorityClass}

    def cold_config(self) -> ColdConfig | None:
        """The SSD tier, None without one. Raises ValueError for a part of it that is missing."""
        if not self.enable_l3_cache:
            return None
        return ColdConfig(
            directories=self.l3_cache_path,
            capacity_bytes=int(self.swap_space * 2**30),
            admission=self.l3_admission,
            compress=self.l3_compression == "zstd",
        )

    def engine_config(self) -> EngineConfig:
        """The engine's part. Raises ValueError for sizes that do not fit together."""
        return EngineConfig(
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            kv_cache_memory_bytes=None if self.kv_cache_memory_gib is None else int(self.kv_cache_memory_gib * 2**30),
            kv_cache_dtype=self.kv_cache_dtype,
            kv_cache_group_size=self.kv_cache_group_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            prefill_chunk_size=self.prefill_chunk_size,
            enable_prefix_caching=self.enable_prefix_caching,
            enable_interrupts=self.enable_interrupts,
            thermal=ThermalPolicy(self.thermal_warn_celsius, self.thermal_limit_celsius)
            if self.enable_thermal_governor
            else None,
            urgent_reserved_seqs=_or(self.urgent_reserved_seqs, self.max_num_seqs // RESERVED_PART),
            urgent_reserved_blocks=_or(self.urgent_reserved_blocks, self.num_blocks // RESERVED_PART),
            inter_token_target_seconds=_or(self.inter_token_target_ms, self.streaming_timeout_ms // 2) / 1000,
            cold=self.cold_config(),
        )


def _or(value: int | None, default: int) -> int:
    return default if value is None else value
