"""What the security settings must have beside each other, and what is said of files that cannot be used."""

import asyncio
from pathlib import Path

import pytest

from worker.broker.kafka_security import KafkaSecurity, TokenError, token_from_file, token_from_function
from worker.errors import SettingsError, StartError
from worker.security import security_of
from worker.setting_sources import load_settings
from worker.settings import Settings

NAMED = {"sasl_username": "me", "sasl_password": "secret"}

REFUSED = {
    "sasl_username and sasl_password": {"security_protocol": "SASL_SSL", "sasl_mechanism": "SCRAM-SHA-512"},
    "needs one of sasl_oauth_token_file": {"security_protocol": "SASL_SSL", "sasl_mechanism": "OAUTHBEARER"},
    "sasl_oauth_token_provider": {
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "OAUTHBEARER",
        "sasl_oauth_token_file": "token",
        "sasl_oauth_token_provider": "a:b",
    },
    "sasl_oauth_token_file needs": {"sasl_oauth_token_file": "token", "security_protocol": "SASL_SSL", **NAMED},
    "tls_ca_file needs security_protocol": {"tls_ca_file": "ca.pem"},
    "tls_key_file needs tls_certificate_file": {"security_protocol": "SSL", "tls_key_file": "key.pem"},
    "tls_key_password needs tls_certificate_file": {
        "security_protocol": "SSL",
        "tls_ca_file": "ca.pem",
        "tls_key_password": "x",
    },
}


@pytest.mark.parametrize("said", REFUSED)
def test_settings_that_do_not_go_together_are_refused_by_name(said: str) -> None:
    """Nothing is sent in plain text, or without a proof, because one setting of two was forgotten."""
    with pytest.raises(SettingsError, match=said):
        load_settings(REFUSED[said], environ={})


def test_no_secret_is_shown() -> None:
    """Neither by `config show` nor in a repr."""
    given = {"security_protocol": "SASL_SSL", **NAMED, "tls_certificate_file": "c.pem", "tls_key_password": "hush"}
    loaded = load_settings(given, environ={})
    shown = repr(loaded.settings) + "".join(value for _, value, _ in loaded.rows())
    shown += repr(KafkaSecurity("SASL_SSL", "PLAIN", "me", "secret", token_from_function(lambda: "hush")))
    assert "secret" not in shown.replace("sasl_password", "")
    assert "hush" not in shown


@pytest.mark.parametrize("setting", ["tls_ca_file", "tls_certificate_file"])
def test_a_file_that_is_no_certificate_is_named_before_anything_connects(setting: str, tmp_path: Path) -> None:
    """Absent or not PEM: one sentence with the setting and the file."""
    bad = tmp_path / "bad.pem"
    bad.write_text("nothing")
    for path in (bad, tmp_path / "absent.pem"):
        with pytest.raises(StartError, match=f"{setting}: cannot use .*{path.name}"):
            security_of(Settings(security_protocol="SSL", **{setting: path}))


async def test_a_token_file_is_read_again_for_each_connection(tmp_path: Path) -> None:
    """Who renews tokens only writes the file; an absent or empty one fails the connection, not the worker."""
    path = tmp_path / "token"
    source = token_from_file(path)
    for text in ("one\n", "two"):
        path.write_text(text)
        assert await source() == text.strip()
    path.write_text("\n")
    with pytest.raises(TokenError, match="is empty"):
        await source()
    path.unlink()
    with pytest.raises(TokenError, match="cannot read"):
        await source()


def test_a_token_provider_is_found_by_name_and_its_failure_holds_no_secret() -> None:
    """A provider that is not there stops the start; one that fails is told by the kind of its error."""
    base = {"security_protocol": "SASL_SSL", "sasl_mechanism": "OAUTHBEARER"}
    found = security_of(Settings(**base, sasl_oauth_token_provider="platform:python_version"))
    assert found.token is not None
    assert asyncio.run(found.token()).count(".") == 2
    for place in ("platform:nothing_there", "no_such_module:f"):
        with pytest.raises(StartError, match=f"there is no {place}"):
            security_of(Settings(**base, sasl_oauth_token_provider=place))

    def failing() -> str:
        raise ValueError("secret")

    with pytest.raises(TokenError, match="ValueError") as failed:
        asyncio.run(token_from_function(failing)())
    assert "secret" not in str(failed.value)
